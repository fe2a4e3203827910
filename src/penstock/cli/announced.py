"""By which address other machines reach a run's manager."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from penstock.config.run import RunConfig
from penstock.weights.addresses import first_host, format_address

__all__ = ["announced", "reachable"]

ANYWHERE = ("0.0.0.0", "::")


def announced(config: RunConfig) -> str:
    """The host by which machines are to reach the manager; empty where none is configured."""
    return config.fleet.advertise or first_host(config.weights.advertise)


def reachable(url: str, advertise: str, here: bool = False) -> str:
    """The manager's address for machines: by the host advertised; else, where it listens at every address, by this
    machine's name. `here`: they are processes of this machine."""
    parts = urlsplit(url)
    host = advertise or parts.hostname or ""
    if host in ANYWHERE:
        host = "127.0.0.1" if here else socket.gethostname()
    return f"{parts.scheme}://{format_address(host, parts.port or 0)}"
