"""Memory of segments: written to again, and never while anybody looks at what is in it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from penstock.cluster import from_tensors, to_tensors
from penstock.cluster.payload import pack, put, unpack
from penstock.cluster.segment import Segment, SegmentPool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are kept on Linux alone")
MIB = 2**20


def filled(value: int, nbytes: int = MIB) -> memoryview:
    return memoryview(bytes([value]) * nbytes)


def file_of(segment: Segment) -> int:
    return os.fstat(segment.fd).st_ino


def test_memory_that_nobody_looks_at_is_written_to_again() -> None:
    pool = SegmentPool()
    first = Segment([filled(1)], pool)
    file = file_of(first)
    del first
    again = Segment([filled(2, MIB // 2), filled(3, 100)], pool)
    assert file_of(again) == file
    assert [bytes(view) for view in again.views()] == [bytes(filled(2, MIB // 2)), bytes(filled(3, 100))]
    assert pool.nbytes == MIB


def test_a_view_of_a_view_holds_the_memory_and_a_descriptor_does() -> None:
    pool = SegmentPool()
    first = Segment([filled(1)], pool)
    file = file_of(first)
    passed = os.dup(first.fd)
    kept = first.views()[0][5:10]
    del first
    second = Segment([filled(2)], pool)
    assert file_of(second) != file
    os.close(passed)
    third = Segment([filled(3)], pool)
    assert file_of(third) != file, "the view alone holds it"
    assert bytes(kept) == b"\1" * 5
    del kept
    assert file_of(Segment([filled(4)], pool)) == file


def test_memory_on_its_way_to_a_reader_is_not_written_to() -> None:
    pool = SegmentPool()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        packed = pack(from_tensors({"x": torch.ones(MIB)}), pool)
        socket.send_fds(ours, [b"x"], packed.fds)
        body, file = packed.body, file_of(packed.segments[0])
        del packed
        other = pack(from_tensors({"x": torch.zeros(MIB)}), pool)
        assert file_of(other.segments[0]) != file
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        got = to_tensors(unpack(body, fds))["x"]
        os.close(fds[0])
        del other
        others = [pack(from_tensors({"x": torch.full((MIB,), 2.0)}), pool) for _ in range(2)]
        assert file not in [file_of(packed.segments[0]) for packed in others]
        assert torch.equal(got, torch.ones(MIB)), "a tensor of what came holds it"
        del got
        assert file_of(pack(from_tensors({"x": torch.ones(MIB)}), pool).segments[0]) == file


def test_a_reader_that_is_killed_lets_go() -> None:
    pool = SegmentPool()
    first = Segment([filled(1)], pool)
    file = file_of(first)
    reader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[first.fd])
    del first
    second = Segment([filled(2)], pool)
    assert file_of(second) != file, "the reader has its descriptor"
    reader.kill()
    reader.communicate()
    assert file_of(Segment([filled(3)], pool)) == file


def test_what_is_kept_is_bounded_and_gone_once_the_pool_is_closed() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    pool = SegmentPool(most_bytes=3 * MIB)
    held = [Segment([filled(k)], pool) for k in range(5)]
    assert pool.nbytes == 3 * MIB
    too_large = Segment([filled(9, 4 * MIB)], pool)
    assert pool.nbytes == 3 * MIB
    stored = put(from_tensors({"x": torch.ones(MIB // 4)}), pool)
    pool.close()
    assert pool.nbytes == 0
    assert [bytes(segment.views()[0]) for segment in held] == [bytes(filled(k)) for k in range(5)]
    late = Segment([filled(7)], pool)
    assert pool.nbytes == 0
    del held, too_large, late
    assert to_tensors(stored)["x"].sum() == MIB // 4
    del stored
    assert len(os.listdir("/proc/self/fd")) <= descriptors
