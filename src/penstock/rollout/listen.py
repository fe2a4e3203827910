"""Where connections come in: from the accepted socket, through TLS, to the first HTTP request.

Decides how long a stranger may take for each of the two, and says who took too long. Refuses to know what is asked for
and by whom.

TLS is begun here and not by asyncio's server, which tells nobody of a handshake that never ends.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

__all__ = ["IDLE_S", "DoorSite", "certificate_shown", "handshake_refused"]

BACKLOG = 128
IDLE_S = 75.0
"""That a connection may stay open between two requests."""


@dataclass(frozen=True, slots=True)
class _Rules:
    handlers: Callable[[], asyncio.Protocol]
    """Makes what speaks HTTP."""
    tls: ssl.SSLContext | None
    knock_s: float
    on_late: Callable[[str, str], None]


def handshake_refused() -> str:
    """To be called where a TLS context refuses a peer, which knows nothing of addresses: the peer's own, or `?`."""
    knocking = _shaking.get()
    if knocking is None:
        return "?"
    knocking.told = True
    return knocking.peer


def certificate_shown() -> None:
    """To be called where a TLS context shows its certificate."""
    knocking = _shaking.get()
    if knocking is not None:
        knocking.shown = True


class DoorSite(web.BaseSite):
    """Listens for a runner. A peer has `knock_s` for the TLS handshake, and as long again for its first request.

    `on_late` gets the address and the fault of one that has neither made in time, and is cut off.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        knock_s: float,
        on_late: Callable[[str, str], None],
    ) -> None:
        super().__init__(runner, backlog=BACKLOG)
        self._where = (host, port)
        self._tls = tls
        self._knock_s = knock_s
        self._on_late = on_late
        self._knocking: dict[asyncio.BaseTransport, _Knocking] = {}
        """Those that have asked for nothing yet."""

    @property
    def name(self) -> str:
        return f"{self._where[0]}:{self._where[1]}"

    async def start(self) -> None:
        """Raises OSError where the address can't be had."""
        await super().start()
        handlers = cast(Callable[[], asyncio.Protocol], self._runner.server)
        rules = _Rules(handlers, self._tls, self._knock_s, self._on_late)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Knocking(rules, self._knocking), *self._where, backlog=BACKLOG)

    async def stop(self) -> None:
        for knocking in list(self._knocking.values()):
            knocking.cut_off()
        await super().stop()

    def asked(self, transport: asyncio.BaseTransport | None) -> None:
        """To be told when a request came over `transport`."""
        knocking = self._knocking.pop(transport, None) if transport is not None else None
        if knocking is not None:
            knocking.asked()


_shaking: ContextVar[_Knocking | None] = ContextVar("shaking", default=None)
"""Whose handshake is being carried on."""


class _Knocking(asyncio.Protocol):
    """One accepted connection. Passes everything on to what speaks HTTP, once TLS is done."""

    def __init__(self, rules: _Rules, knocking: dict[asyncio.BaseTransport, _Knocking]) -> None:
        self._rules = rules
        self._knocking = knocking
        self._handler = rules.handlers()
        self._handed_on = False
        """The handler knows of the connection."""
        self._transport: asyncio.Transport
        self.peer = "?"
        self.shown = self.told = False
        """In its TLS handshake: it was shown the certificate, and it was refused."""
        self._early: list[bytes] | None = None
        """What came before the handler knew of its transport."""
        self._timer: asyncio.TimerHandle | None = None
        self._securing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        name: Any = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else "?"
        plain = self._transport = cast(asyncio.Transport, transport)
        if self._rules.tls is None:
            self._hand_on(plain)
            return
        # What comes is TLS, and nothing may take it before TLS is there.
        plain.pause_reading()
        self._early = []
        self._knocking[plain] = self
        self._securing = asyncio.create_task(self._secure(plain, self._rules.tls), name=f"TLS with {self.peer}")

    async def _secure(self, plain: asyncio.Transport, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._rules.knock_s
        # What reads for the handshake runs in this task's context.
        _shaking.set(self)
        try:
            secured = await loop.start_tls(plain, self, tls, server_side=True, ssl_handshake_timeout=limit_s)
        except OSError as error:
            # A refusal is told where TLS finds it, and who left before it was shown anything is nobody's business.
            if isinstance(error, ConnectionAbortedError) and error.errno is None:
                if not self.told:
                    self._rules.on_late(self.peer, f"it did not end the TLS handshake within {limit_s:g} s")
            elif self.shown and not self.told:
                self._rules.on_late(self.peer, "it left when it was shown the certificate, which it may not trust")
        else:
            # None of a connection that was lost meanwhile.
            if secured is not None:
                self._hand_on(secured)
        finally:
            self._knocking.pop(plain, None)

    def _hand_on(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._handed_on = True
        self._knocking[transport] = self
        self._timer = asyncio.get_running_loop().call_later(self._rules.knock_s, self._late)
        self._handler.connection_made(transport)
        early, self._early = self._early, None
        if early:
            self._handler.data_received(b"".join(early))

    def _late(self) -> None:
        self._rules.on_late(self.peer, f"it sent no HTTP request within {self._rules.knock_s:g} s")
        self.cut_off()

    def asked(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def cut_off(self) -> None:
        if self._securing is not None:
            self._securing.cancel()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._early is None:
            self._handler.data_received(data)
        else:
            self._early.append(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._handed_on else None

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self.asked()
        self._knocking.pop(self._transport, None)
        if self._handed_on:
            self._handler.connection_lost(error)
