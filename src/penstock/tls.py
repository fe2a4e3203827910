"""TLS contexts for the doors, and what certificates and failed handshakes say in words.

Decides that nothing below TLS 1.2 is spoken, that both sides are verified where a CA is given, and that a peer whose
certificate is refused hears why. Refuses to know what a role may do.

asyncio closes a connection whose handshake fails before the alert is sent, so that a client sees a mere
disconnection. `_Told` keeps the handshake open until the alert is out and the client, or the handshake's deadline,
ends it.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

__all__ = [
    "HINT_TLS",
    "NO_TLS",
    "certificate_role",
    "client_context",
    "common_name",
    "hung_up",
    "refusal_words",
    "server_context",
    "tell_late",
]

HINT_TLS = "it ended the connection unasked; if it speaks TLS, its address begins with https://"
"""For whoever spoke plain HTTP and was hung up on."""
NO_TLS = "the other side does not speak TLS at that port"
LATE_STEPS = 8
"""Of a handshake that has failed: the client reads the alert and goes; one that sends on instead is cut off."""

_ALERTS = {
    "CERTIFICATE_EXPIRED": "this machine's certificate has expired",
    "CERTIFICATE_REQUIRED": "it asks for a certificate, and this machine gave none (--tls-cert and --tls-key)",
    "UNKNOWN_CA": "this machine's certificate is not signed by the CA that the other side trusts",
    "BAD_CERTIFICATE": "this machine's certificate is not accepted",
    "UNSUPPORTED_CERTIFICATE": "this machine's certificate is not meant for clients",
    "CERTIFICATE_REVOKED": "this machine's certificate was revoked",
    "CERTIFICATE_UNKNOWN": "this machine's certificate is not accepted",
    "HANDSHAKE_FAILURE": "no common ground for TLS; it may ask for a certificate (--tls-cert and --tls-key)",
    "WRONG_VERSION_NUMBER": NO_TLS,
    "PROTOCOL_VERSION": "the other side speaks another version of TLS; 1.2 is the least",
}
"""What an alert, or an error of one's own side, means to whoever reads it there."""


def server_context(
    cert: str, key: str, client_ca: str, on_refused: Callable[[str], None], on_shown: Callable[[], None] = lambda: None
) -> ssl.SSLContext:
    """For a listening socket. With `client_ca`, every client must have a certificate that it signed.

    `on_refused` gets the reason of each failed handshake, `on_shown` hears of each whose client is being shown the
    certificate, and may leave without a word. Raises ConfigError for files that can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, cert, key)
    if client_ca:
        _load_ca(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    told = {"on_refused": staticmethod(on_refused), "on_shown": staticmethod(on_shown)}
    context.sslobject_class = type("_ToldBy", (_Told,), told)
    return context


def tell_late(context: ssl.SSLContext, error: OSError, limit_s: float) -> None:
    """Tells the `on_refused` of a server's context, where `error` is asyncio's word for a handshake that went on for
    `limit_s`. What else may end a handshake is told by itself, or is the peer's own leaving."""
    if isinstance(error, ConnectionAbortedError) and error.errno is None and issubclass(context.sslobject_class, _Told):
        context.sslobject_class.on_refused(f"it did not end the TLS handshake within {limit_s:g} s")


def client_context(ca: str, cert: str = "", key: str = "") -> ssl.SSLContext:
    """For dialling: the other side is verified by `ca` (the system's CAs where it is empty), its name too.

    Raises ConfigError for files that can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca:
        _load_ca(context, ca)
    else:
        context.load_default_certs()
    if cert or key:
        _load_pair(context, cert, key)
    return context


def certificate_role(certificate: Mapping[str, Any], roles: frozenset[str]) -> str:
    """The role that a verified certificate names, by its OU or as the first part of its CN (`agent/spot-7`), or ''."""
    units = {value for kind, value in _subject(certificate) if kind == "organizationalUnitName" and value in roles}
    first, slash, _ = common_name(certificate).partition("/")
    if slash and first in roles:
        units.add(first)
    # A certificate that names two roles names none: whoever signed it may have meant either.
    return units.pop() if len(units) == 1 else ""


def common_name(certificate: Mapping[str, Any]) -> str:
    return next((value for kind, value in _subject(certificate) if kind == "commonName"), "")


def refusal_words(error: BaseException) -> str:
    """Why TLS failed, for the side that dialled; empty where `error` is not about TLS."""
    for cause in _chain(error):
        # aiohttp's errors are some too, without the words, which are in the errors that they wrap.
        if isinstance(cause, ssl.SSLCertVerificationError) and hasattr(cause, "verify_message"):
            return f"the other side's certificate is not accepted here: {cause.verify_message}"
        if isinstance(cause, ssl.SSLError) and hasattr(cause, "reason") and cause.reason != "CERTIFICATE_VERIFY_FAILED":
            reason = str(cause.reason or cause)
            return next((words for alert, words in _ALERTS.items() if reason.endswith(alert)), f"TLS failed: {reason}")
    return ""


def hung_up(error: BaseException) -> bool:
    """The other side ended the connection without an answer, as one does that waits for a TLS handshake."""
    import aiohttp

    return isinstance(error, aiohttp.ServerDisconnectedError) or getattr(error, "errno", None) == errno.ECONNRESET


class _Told(ssl.SSLObject):
    """The server's side of a handshake, which lets the alert out before it ends."""

    on_refused: Callable[[str], None]
    on_shown: Callable[[], None]
    _late_steps = 0

    def do_handshake(self) -> None:
        if self._late_steps:
            self._late_steps += 1
            if self._late_steps > LATE_STEPS:
                raise ssl.SSLError("the handshake has failed already")
            raise ssl.SSLWantReadError
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if self.shared_ciphers() is not None:
                # Its hello was read, and the answer to that has the certificate in it.
                self.on_shown()
            raise
        except ssl.SSLError as error:
            self.on_refused(_server_words(error))
            if error.reason == "HTTP_REQUEST":
                # It understands no alert, and waits for an answer until its patience ends.
                raise
            self._late_steps = 1
            # As if more were needed: asyncio then sends what is there to be sent, which is the alert.
            raise ssl.SSLWantReadError from error


def _server_words(error: ssl.SSLError) -> str:
    """One of few, so that repeats can be counted."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it gave no certificate"
    if "_ALERT_" in (error.reason or "") and any(word in error.reason for word in ("CERTIFICATE", "UNKNOWN_CA")):
        return f"it refuses the certificate that it is shown here ({error.reason})"
    if error.reason == "HTTP_REQUEST":
        return "it spoke HTTP where TLS is spoken (use https://)"
    return f"the TLS handshake failed: {error.reason or 'no reason given'}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = 0
    while error is not None and seen < 8:
        yield error
        for inner in (getattr(error, "os_error", None), getattr(error, "certificate_error", None)):
            if isinstance(inner, BaseException):
                yield inner
        error, seen = error.__cause__ or error.__context__, seen + 1


def _subject(certificate: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [pair for part in certificate.get("subject", ()) for pair in part]


def _load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    if not cert or not key:
        raise ConfigError("--tls-cert and --tls-key belong together; one of them is missing")
    for path in (cert, key):
        if not Path(path).is_file():
            raise ConfigError(f"the TLS file {path} is not there")
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificate {cert} and the key {key} can't be used: {error}") from error


def _load_ca(context: ssl.SSLContext, ca: str) -> None:
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the CA certificates {ca} can't be used: {error}") from error
