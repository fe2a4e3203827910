"""The doors of a run of `penstock train`: its tokens out of the environment, its TLS out of PEM files.

Decides which of them the run's own parts use. Refuses to know what a role may do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from penstock.config.run import ManagerConfig, TlsConfig
from penstock.observe.events import ConnectionRefused, Event
from penstock.rollout.doors import Knocks, Tokens
from penstock.tls import client_context, server_context

__all__ = ["RunDoors", "how_to_join", "tokens_of"]


class RunDoors:
    """TLS contexts of a run, or None for each where the configuration has no certificate.

    `emit` gets the reasons of handshakes that fail at the weight store, on its thread. Raises ConfigError for files
    that can't be used.
    """

    def __init__(self, tls: TlsConfig, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._knocks = Knocks()
        secured = bool(tls.cert)
        self.store = server_context(tls.cert, tls.key, tls.client_ca, self._refused) if secured else None
        """What the weight store shows."""
        self.own = client_context(tls.ca, tls.own_cert, tls.own_key) if secured else None
        """With which the trainer speaks to its manager."""

    def _refused(self, cause: str) -> None:
        times = self._knocks.count("weights", cause)
        if times:
            self._emit(ConnectionRefused(ts=time.time(), peer="?", door="weights", cause=cause, times=times))


def tokens_of(doors: ManagerConfig, environment: Mapping[str, str]) -> Tokens:
    """Empty where the environment has none. The configuration holds names alone, since it is kept with the run."""

    def named(variable: str) -> str:
        return environment.get(variable, "").strip()

    return Tokens(
        shared=named(doors.token_env),
        agent=named(doors.agent_token_env),
        trainer=named(doors.trainer_token_env),
        operator=named(doors.operator_token_env),
    )


def how_to_join(tls: TlsConfig) -> str:
    """What the command line of `penstock join` needs besides the manager's address."""
    if not tls.cert:
        return ""
    return " --tls-ca CA.pem" + (" --tls-cert CERT.pem --tls-key KEY.pem" if tls.client_ca else "")
