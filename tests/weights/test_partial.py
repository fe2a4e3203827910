"""What is kept of a pull on disk, by several threads at once."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from test_weight_store import CONFIG, TOKEN

from penstock.weights import WeightStore, encode_manifest
from penstock.weights import partial as module
from penstock.weights.partial import Partial


def test_a_thread_for_whom_the_disk_is_full_closes_no_file_that_others_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=1024)
    data = os.urandom(16 * 1024)
    manifest = store.publish(0, [("w", "U8", (len(data),), data)], CONFIG)
    kept = Partial(tmp_path, manifest, encode_manifest(manifest))
    threads, closed = 8, []
    begun = Barrier(threads)
    pwrite, close = os.pwrite, os.close

    def full(file: int, view: Any, at: int) -> int:
        if at == 0:
            raise OSError(errno.ENOSPC, "no space left")
        written = pwrite(file, view, at)
        assert file not in closed
        return written

    def noted(file: int) -> None:
        closed.append(file)
        close(file)

    monkeypatch.setattr(module.os, "pwrite", full)
    monkeypatch.setattr(module.os, "close", noted)

    def put(index: int) -> None:
        begun.wait(30)
        for chunk in [index, index + threads] * 50:
            kept.put(chunk, data[1024 * chunk : 1024 * (chunk + 1)])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, range(threads)))
    assert "no space left" in kept.trouble
    assert len(closed) == 2
