"""What the leading rank of a tensor-parallel engine tells the others, and how: msgpack over a socket pair.

Pure but for the socket that it is given. Weights do not pass through it: a message may carry the descriptor of memory
that both sides map.
"""

from __future__ import annotations

import array
import socket
import struct
from typing import TypeVar

import msgspec

from penstock.errors import EngineError
from penstock.weights.manifest import TensorEntry

__all__ = [
    "Allocate",
    "Channel",
    "ChannelClosed",
    "Decode",
    "Done",
    "Extend",
    "Forget",
    "Join",
    "Move",
    "Prefill",
    "Prepare",
    "Release",
    "Swap",
    "Wipe",
]

LENGTH = struct.Struct("<I")
MAX_BYTES = 1 << 30
"""A message is ids and lengths of one step; more is a mistake."""


class ChannelClosed(EngineError):
    """The other side is gone."""


class _Message(msgspec.Struct, tag=True, frozen=True):
    pass


class Join(_Message, frozen=True):
    """The first message: which rank the receiver is, and where the ranks meet. Answered with Done."""

    rank: int
    ranks: int
    store_path: str
    threads: int
    wait_s: float


class Prepare(_Message, frozen=True):
    """Lay out a version whose bytes are in the memory that comes along. Answered with Done."""

    version: int
    config_json: str
    dtype: str
    """float32 or bfloat16: what it is served in."""
    tensors: tuple[TensorEntry, ...]
    """This rank's own, with the checksums of their bytes, one after the other in memory."""


class Forget(_Message, frozen=True):
    """A prepared version that will not serve."""

    version: int


class Swap(_Message, frozen=True):
    """Serve a prepared version from the next step on. Answered with Done."""

    version: int
    slots: int
    positions: int


class Prefill(_Message, frozen=True):
    ids_BT: bytes
    """int64, [B, T]."""
    lengths_B: tuple[int, ...]
    first_slot: int
    row_of_slot: tuple[int, ...] | None
    slots: int


class Decode(_Message, frozen=True):
    ids_B: bytes
    """int64."""
    positions_B: bytes
    """int64."""
    attended: int


class Extend(_Message, frozen=True):
    ids_T: bytes
    """int64."""
    slot: int
    start: int
    ahead: int
    """A prepared version to do it with, which does not serve yet; -1 for the one that does."""


class Move(_Message, frozen=True):
    source: int
    target: int
    tokens: int


class Wipe(_Message, frozen=True):
    slot: int


class Allocate(_Message, frozen=True):
    pass


class Release(_Message, frozen=True):
    pass


class Done(_Message, frozen=True):
    """The answer of a rank; `cause` is empty where it did what it was told."""

    cause: str = ""


ToRank = Join | Prepare | Forget | Swap | Prefill | Decode | Extend | Move | Wipe | Allocate | Release
_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[Done] = msgspec.msgpack.Decoder(Done)
M = TypeVar("M")


class Channel:
    """One end of a socket pair. For one thread at a time. Raises ChannelClosed where the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, message: ToRank | Done, descriptor: int | None = None) -> None:
        body = _encoder.encode(message)
        head = LENGTH.pack(len(body))
        try:
            if descriptor is None:
                self._sock.sendall(head + body)
                return
            socket.send_fds(self._sock, [head], [descriptor])
            self._sock.sendall(body)
        except OSError as error:
            raise ChannelClosed(f"the other rank can't be told: {error}") from error

    def order(self) -> tuple[ToRank, int | None]:
        """What the leader says next, and the descriptor that came along. Waits as long as the leader lives."""
        return self._receive(_to_rank)

    def answer(self, wait_s: float) -> Done:
        """Raises EngineError where none comes within `wait_s`."""
        self._sock.settimeout(wait_s)
        try:
            return self._receive(_from_rank)[0]
        finally:
            self._sock.settimeout(None)

    def close(self) -> None:
        self._sock.close()

    def _receive(self, decoder: msgspec.msgpack.Decoder[M]) -> tuple[M, int | None]:
        try:
            head, descriptor = self._head()
            (length,) = LENGTH.unpack(head)
            if length > MAX_BYTES:
                raise EngineError(f"a rank announces a message of {length} bytes")
            return decoder.decode(self._exactly(length)), descriptor
        except TimeoutError as error:
            raise EngineError(f"it said nothing for {self._sock.gettimeout():g} s") from error
        except OSError as error:
            raise ChannelClosed(f"the other rank is gone: {error}") from error
        except msgspec.DecodeError as error:
            raise EngineError(f"the other rank said something unknown: {error}") from error

    def _head(self) -> tuple[bytes, int | None]:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        head, ancillary, _, _ = self._sock.recvmsg(LENGTH.size, room)
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not head:
            raise ChannelClosed("the other rank has closed its side")
        return head + self._exactly(LENGTH.size - len(head)), descriptors[0] if descriptors else None

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view, filled = memoryview(data), 0
        while filled < nbytes:
            got = self._sock.recv_into(view[filled:])
            if not got:
                raise ChannelClosed("the other rank has closed its side")
            filled += got
        return bytes(data)
