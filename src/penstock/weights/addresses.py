"""Addresses of weight stores: how they are written, read, listened on and found. Pure but for the two that ask the
system."""

from __future__ import annotations

import errno
import socket

from penstock.errors import PortInUse, WeightError

__all__ = [
    "advertised",
    "first_host",
    "format_address",
    "listen",
    "outward_address",
    "parse_address",
    "parse_addresses",
]


def parse_addresses(source: str) -> list[tuple[str, int]]:
    """`host:port`, or several with commas between them. Raises WeightError."""
    return [parse_address(one.strip()) for one in source.split(",")]


def parse_address(source: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises WeightError."""
    host, colon, port = source.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise WeightError(f"{source!r} is not the address of a weight store; expected host:port")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised(names: str, port: int) -> str:
    """Hosts as a configuration gives them, with commas between them and with ports where they need one, in full."""
    return ",".join(_with_port(name.strip(), port) for name in names.split(","))


def first_host(names: str) -> str:
    """The first of such hosts, without its port; empty for none."""
    return parse_address(advertised(names, 1).partition(",")[0])[0] if names.strip() else ""


def _with_port(name: str, own_port: int) -> str:
    host, colon, port = name.rpartition(":")
    has_port = colon and port.isdecimal() and (":" not in host or host.endswith("]"))
    return name if has_port else format_address(name.strip("[]"), own_port)


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"the weight store can't listen on {format_address(host, port)}: the port is in use; "
                "set weights.port to another one, or to 0 for any free one"
            ) from error
        raise WeightError(f"the weight store can't listen on {format_address(host, port)}: {error}") from error
    listener.setblocking(False)
    return listener


def outward_address() -> str:
    """This machine's address on the way out; a datagram socket picks a route without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # 192.0.2.1 is set aside for documentation (RFC 5737); no packet goes there.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
