"""Large pieces move on threads, small ones on the loop; what is read is what was sent, however it was cut."""

from __future__ import annotations

import array
import asyncio
import fcntl
import gc
import random
import socket
import struct
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.weights import bulk
from penstock.weights.bulk import BULK_BYTES, BulkSocket, after
from penstock.weights.framed import FramedSocket, counted_from
from penstock.weights.protocol import LENGTH, LinkLost


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


async def test_pieces_of_any_size_come_as_they_were_sent() -> None:
    one, other = pair()
    sender, reader = FramedSocket(one, "the reader"), FramedSocket(other, "the sender")
    draw = random.Random(0)
    sizes = [draw.choice([0, 1, 7, 5000, 65_536, 70_000, BULK_BYTES, 3 * BULK_BYTES + 5]) for _ in range(60)]
    data = draw.randbytes(sum(sizes))
    view = memoryview(data)

    async def send() -> None:
        at = 0
        for number, size in enumerate(sizes):
            part = view[at : at + size]
            await (sender.send(part) if number % 2 else sender.send(part[: size // 3], part[size // 3 :]))
            at += size

    sending = asyncio.create_task(send())
    got = bytearray()
    while len(got) < len(data):
        into = bytearray(min(len(data) - len(got), draw.choice([1, 4, 3000, 100_000, 2 * BULK_BYTES])))
        await reader.read_into(memoryview(into))
        got += into
    await sending
    assert got == data
    sender.close()
    with pytest.raises(LinkLost, match="closed the connection"):
        await reader.read_into(memoryview(bytearray(2 * BULK_BYTES)))
    reader.close()


async def test_a_thread_leaves_a_connection_on_which_nothing_moves() -> None:
    one, other = pair()
    one.setblocking(False)
    held = BulkSocket(one)
    assert await held.receive_some([memoryview(bytearray(BULK_BYTES))], BULK_BYTES) == 0
    other.sendall(b"four")
    into = bytearray(BULK_BYTES)
    assert await held.receive_some([memoryview(into)], BULK_BYTES) == 4
    assert into[:4] == b"four"
    sent = await held.send_some([memoryview(bytes(64 << 20))])
    assert 0 < sent < 64 << 20
    held.close()
    assert one.fileno() == -1
    other.close()


async def test_a_socket_is_closed_once_its_thread_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "LINGER_US", 600_000_000)
    one, other = pair()
    one.setblocking(False)
    held = BulkSocket(one)
    receiving = asyncio.create_task(held.receive_some([memoryview(bytearray(BULK_BYTES))], BULK_BYTES))
    await asyncio.sleep(0.05)
    held.close()
    assert await receiving == 0
    while one.fileno() != -1:
        await asyncio.sleep(0.001)
    other.close()


async def test_a_thread_goes_on_with_what_is_left_until_it_is_stopped() -> None:
    one, other = pair()
    one.setblocking(False)
    held = BulkSocket(one)
    first, second = bytearray(BULK_BYTES), bytearray(BULK_BYTES)
    parts = [memoryview(first), memoryview(second)]
    sending = asyncio.create_task(asyncio.to_thread(other.sendall, b"x" * (BULK_BYTES + 5)))
    came = 0
    while came < BULK_BYTES + 5:
        came += await held.receive_some(after(parts, came), min(BULK_BYTES, BULK_BYTES + 5 - came))
    await sending
    assert first == b"x" * BULK_BYTES
    assert second[:5] == b"xxxxx"
    while held.receives:
        assert await held.receive_some(after(parts, came), 1) == 0
    waiting = asyncio.create_task(held.receive_some(after(parts, came), 1))
    await asyncio.sleep(0)
    await held.stop()
    assert await waiting == 0
    assert one.fileno() == -1
    assert not any(second[5:])
    other.close()


async def test_parts_are_let_go_once_they_are_filled() -> None:
    """Memory that somebody refers to is not staged in again."""
    one, other = pair()
    one.setblocking(False)
    held, into = BulkSocket(one), bytearray(BULK_BYTES)
    sending = asyncio.create_task(asyncio.to_thread(other.sendall, bytes(BULK_BYTES)))
    came = 0
    while came < BULK_BYTES:
        came += await held.receive_some(after([memoryview(into)], came), BULK_BYTES - came)
    await sending
    into.append(0)
    held.close()
    other.close()


@pytest.mark.parametrize("nbytes", [BULK_BYTES // 4, 32 * BULK_BYTES])
@pytest.mark.parametrize("sends", [True, False])
async def test_memory_is_let_go_of_when_the_other_end_breaks(sends: bool, nbytes: int) -> None:
    """At once, and not when the collector comes by: what is left may be too little for the next version."""
    memory = bytearray(nbytes)
    one, other = pair()
    framed = FramedSocket(one, "peer")

    async def move() -> None:
        lost = False
        while not lost:
            try:
                await (framed.send(memory) if sends else framed.read_into(memoryview(memory)))
            except LinkLost:
                lost = True
        framed.close()

    gc.disable()
    try:
        moving = asyncio.create_task(move())
        await asyncio.sleep(0.05)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # By a reset.
        other.close()
        await moving
        memory.append(0)
    finally:
        gc.enable()


async def test_what_was_read_ahead_comes_first_and_is_placed_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first byte in fresh memory has the system clear 2 MiB: not on the loop, nor under the interpreter's lock."""
    placed: list[bool] = []

    def copy(into: memoryview, data: memoryview, whole: Callable[[memoryview, memoryview], None] = bulk._copy) -> None:
        placed.append(threading.current_thread() is threading.main_thread())
        whole(into, data)

    monkeypatch.setattr(bulk, "_copy", copy)
    one, other = pair()
    sender, reader = FramedSocket(one, "the reader"), FramedSocket(other, "the sender")
    data = random.Random(0).randbytes(2 * BULK_BYTES)
    message = LENGTH.pack(5) + b"words"
    head = message + data[:5000]
    await sender.send(head)
    while unread(other) < len(head):
        await asyncio.sleep(0.001)
    assert bytes(await reader.read_message()) == b"words"
    into = bytearray(len(data))
    view, heard = memoryview(into), list[tuple[int, int]]()
    parts = [view[:1000], view[1000:BULK_BYTES], view[BULK_BYTES:]]
    sending = asyncio.create_task(sender.send(data[5000:]))
    came = 0
    while came < len(data):
        tell = counted_from(lambda number, left: heard.append((number, left)), len(parts) - len(after(parts, came)))
        came += await reader.read_parts(after(parts, came), len(data) - came, told=tell)
    await sending
    assert into == data
    assert placed == [False, False], "into the first part and the second"
    assert heard[:2] == [(0, 0), (1, BULK_BYTES - 5000)]
    assert [number for number, left in heard if not left] == [0, 1, 2]
    for number in range(3):
        lefts = [left for which, left in heard if which == number]
        assert lefts == sorted(lefts, reverse=True)
    sender.close()
    reader.close()


async def test_a_thread_that_reads_gladly_wakes_the_loop_late_and_keeps_nothing_back_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited_for: list[int] = []

    async def receive(held: BulkSocket, parts: Sequence[memoryview], least: int, *rest: Any) -> int:
        waited_for.append(least)
        return await whole(held, parts, least, *rest)

    whole = BulkSocket.receive_some
    monkeypatch.setattr(BulkSocket, "receive_some", receive)
    one, other = pair()
    sender, reader = FramedSocket(one, "the reader"), FramedSocket(other, "the sender")
    data = random.Random(0).randbytes(8 * BULK_BYTES)
    into = bytearray(len(data))
    parts = [memoryview(into)[at : at + BULK_BYTES] for at in range(0, len(data), BULK_BYTES)]
    sending = asyncio.create_task(sender.send(data[:-1]))
    came = 0
    while came < len(data) - 1:
        # The last byte never comes: what is there is not kept back for it.
        came += await reader.read_parts(after(parts, came), 1, gladly=len(data) - came)
    await sending
    assert waited_for[0] == len(data)
    assert into[:-1] == data[:-1]
    sender.close()
    with pytest.raises(LinkLost, match="closed"):
        await reader.read_parts(after(parts, came), 1, gladly=1)
    reader.close()


def unread(sock: socket.socket) -> int:
    there = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, there)
    return there[0]


def test_what_is_left_of_parts() -> None:
    parts = [memoryview(b"abc"), memoryview(b""), memoryview(b"de")]
    for sent in range(6):
        assert b"".join(after(parts, sent)) == b"abcde"[sent:]


async def test_of_several_pieces_the_first_is_not_kept_back_for_the_others() -> None:
    one, other = pair()
    one.setblocking(False)
    reader = FramedSocket(other, "the sender")
    for size in (3, BULK_BYTES):
        data = bytes(size) + b"x"
        first, second = bytearray(size), bytearray(BULK_BYTES)
        parts = [memoryview(first), memoryview(second)]
        await asyncio.get_running_loop().sock_sendall(one, data)
        came = await reader.read_parts(parts, size)
        assert came in (size, size + 1)
        if came == size:
            assert await reader.read_parts(parts[1:], 1) == 1
        assert bytes(first + second[:1]) == data
    one.close()
    with pytest.raises(LinkLost, match="closed"):
        await reader.read_parts([memoryview(bytearray(3)), memoryview(bytearray(BULK_BYTES))], 3)
    reader.close()
