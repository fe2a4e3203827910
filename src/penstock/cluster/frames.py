"""Frames on a socket between a controller and one local worker: length, body, and descriptors that go along."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from penstock.cluster.errors import ClusterError

_HEAD = struct.Struct("<QB")
MAX_FDS = 200
MAX_FRAME_BYTES = 1 << 32


class Hello(msgspec.Struct, tag=True):
    """What a worker is: its first frame. Its arguments follow as the body of a call."""

    group: str
    rank: int
    size: int
    roles: dict[str, str]


class Call(msgspec.Struct, tag=True):
    number: int
    role: str
    method: str
    answer: bool
    body: bytes


class Ready(msgspec.Struct, tag=True):
    pid: int


class Answer(msgspec.Struct, tag=True):
    number: int
    body: bytes


class Fault(msgspec.Struct, tag=True):
    """A method raised, or the worker's classes couldn't be made (number 0)."""

    number: int
    cause: str
    traceback: str


ToWorker = Hello | Call
FromWorker = Ready | Answer | Fault
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
encode = msgspec.msgpack.Encoder().encode


def send(sock: socket.socket, body: bytes, fds: Sequence[int] = ()) -> None:
    """Sends one frame whole. Raises OSError (TimeoutError among them) and ClusterError."""
    if len(fds) > MAX_FDS:
        raise ClusterError(f"a call has {len(fds)} stored batches; at most {MAX_FDS} go with one call")
    head = _HEAD.pack(len(body), len(fds))
    if not fds and len(body) < 65536:
        sock.sendall(head + body)
        return
    sent = socket.send_fds(sock, [head], list(fds)) if fds else 0
    sock.sendall(head[sent:])
    sock.sendall(body)


def receive(sock: socket.socket) -> tuple[bytearray, list[int]]:
    """One frame and its descriptors, which are the caller's to close. Raises EOFError at the end."""
    head, fds, _, _ = socket.recv_fds(sock, _HEAD.size, MAX_FDS)
    try:
        if not head:
            raise EOFError
        data = bytearray(head)
        while len(data) < _HEAD.size:
            data += _some(sock.recv(_HEAD.size - len(data)))
        length, count = _HEAD.unpack(data)
        if length > MAX_FRAME_BYTES or count != len(fds):
            raise ClusterError(f"a frame of {length} bytes and {count} descriptors came with {len(fds)}")
        body = bytearray(length)
        view, at = memoryview(body), 0
        while at < length:
            got = sock.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return body, fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _some(data: bytes) -> bytes:
    if not data:
        raise EOFError
    return data
