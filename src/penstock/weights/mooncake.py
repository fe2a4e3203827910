"""Mooncake's transfer engine: a puller reads chunks out of the store's registered memory, over RDMA where there is any.

The store registers the memory of each raw version and names it by segment and address; the puller's engine reads it,
over InfiniBand or RoCE devices where both ends have them and over TCP otherwise. Mooncake knows no token and encrypts
nothing: who reaches its port can read the weights and write over them. So it is never used unless both ends name it in
`weights.ways`, and belongs in networks that are trusted; what was written over is found by its checksum.
Needs the package `mooncake-transfer-engine` (machines with CUDA) or `mooncake-transfer-engine-non-cuda`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import logging
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import MissingExtra
from penstock.weights.protocol import Way
from penstock.weights.transport import WayClosed

__all__ = ["MooncakeFetcher", "MooncakeLender", "MooncakeReader"]

RDMA_DEVICES = Path("/sys/class/infiniband")
HANDSHAKE = "P2PHANDSHAKE"
"""No metadata service: the two ends tell each other."""

log = logging.getLogger(__name__)


def _carrier() -> str:
    """rdma where this machine has a device for it, and tcp otherwise."""
    with contextlib.suppress(OSError):
        if any(RDMA_DEVICES.iterdir()):
            return "rdma"
    return "tcp"


class _Engine:
    """This process's transfer engine, and the memory that is registered with it."""

    def __init__(self, host: str) -> None:
        try:
            engine: Any = importlib.import_module("mooncake.engine")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError):
                raise MissingExtra("mooncake-transfer-engine", "mooncake", "weights.ways with mooncake") from error
            # It links against system libraries that pip does not bring: libibverbs1, libnl-3-200, libnuma1, ...
            raise WayClosed(f"Mooncake's transfer engine can't be loaded: {error}") from error
        self.carrier = _carrier()
        self._engine: Any = engine.TransferEngine()
        code = self._engine.initialize(host, HANDSHAKE, self.carrier, "")
        if code:
            raise WayClosed(f"Mooncake's transfer engine does not start on {host} over {self.carrier} (code {code})")
        self.segment = f"{host}:{self._engine.get_rpc_port()}"
        # Memory may be given back, by the collector of cycles, in the midst of another's registration.
        self._lock = threading.RLock()
        self._registered: dict[int, weakref.ref[Any]] = {}
        """Whose memory each address is."""

    def register(self, buffer: memoryview) -> int:
        """The address of the whole memory that `buffer` is of, registered until that memory is given back."""
        whole = memoryview(buffer.obj)
        # A ctypes object would hold on to the buffer; the address alone doesn't.
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        with self._lock:
            known = self._registered.get(address)
            if known is None or known() is not buffer.obj:
                if known is not None:
                    # That memory is given back, and this has its place; nobody has told of it yet.
                    self._unregister(address, known)
                code = self._engine.register_memory(address, whole.nbytes)
                if code:
                    raise WayClosed(f"Mooncake registers no {whole.nbytes} bytes of memory (code {code})")
                self._registered[address] = owner = weakref.ref(buffer.obj)
                weakref.finalize(buffer.obj, self._unregister, address, owner)
        return address

    def registered(self, address: int) -> bool:
        with self._lock:
            return address in self._registered

    def read(self, segment: str, address: int, into: memoryview) -> None:
        """Blocks, with the interpreter's lock free, until `into` is filled. Raises WayClosed."""
        self.register(into)
        own = ctypes.addressof(ctypes.c_char.from_buffer(into))
        code = self._engine.transfer_sync_read(segment, own, address, into.nbytes)
        if code:
            raise WayClosed(f"Mooncake read nothing from {segment} (code {code})")

    def _unregister(self, address: int, owner: weakref.ref[Any]) -> None:
        with self._lock:
            if self._registered.get(address) is owner:
                del self._registered[address]
                self._engine.unregister_memory(address)


@cache
def _engine(host: str) -> _Engine:
    return _Engine(host)


class MooncakeLender:
    """The store's side; `host` is how pullers reach this machine. Raises MissingExtra or WayClosed."""

    kind = "mooncake"
    makes_memory = False

    def __init__(self, host: str) -> None:
        self._engine = _engine(host)

    def way(self, said: str) -> Way | None:
        return Way(self.kind, self._engine.segment) if said == f"{self.kind}:{self._engine.carrier}" else None

    def buffer(self, nbytes: int) -> memoryview | None:
        return None

    def lend(self, stream: memoryview) -> None:
        if not stream.nbytes:
            return
        try:
            self._engine.register(stream)
        except WayClosed as error:
            log.warning("a version is not lent by Mooncake: %s", error)

    def claim(self, stream: memoryview) -> bool:
        # Who reads it holds a lease on the version, and it is collected after that.
        return True

    def place(self, stream: memoryview) -> str:
        if not stream.nbytes:
            return ""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memoryview(stream.obj)))
        return str(address) if self._engine.registered(address) else ""

    def close(self) -> None:
        pass


class MooncakeFetcher:
    """The puller's side; `host` is this machine's address. Raises MissingExtra or WayClosed."""

    kind = "mooncake"

    def __init__(self, host: str) -> None:
        self._engine = _engine(host)

    def says(self) -> str:
        return f"{self.kind}:{self._engine.carrier}"

    def open(self, way: Way) -> MooncakeReader:
        return MooncakeReader(self._engine, way.where)


class MooncakeReader:
    """Reads from one segment, on threads.

    A read has no deadline of its own: one that is given up may still write to the buffer, so nobody else may have that
    buffer before the read has ended. The pull's deadline ends the pull, and its buffer lives as long as the read.
    """

    def __init__(self, engine: _Engine, segment: str) -> None:
        self._engine = engine
        self._segment = segment

    async def read_into(self, place: str, offset: int, into: memoryview) -> None:
        if not place.isdecimal():
            raise WayClosed(f"{place!r} is no address of Mooncake's")
        await asyncio.to_thread(self._engine.read, self._segment, int(place) + offset, into)

    def close(self) -> None:
        pass
