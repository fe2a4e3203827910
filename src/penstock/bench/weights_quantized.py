"""Quantized versions: how small, how fast a core makes them, and what the difference of two weighs."""

from __future__ import annotations

import math
import statistics
import time

from penstock.bench.common import Result, at_least
from penstock.bench.weights_pair import drawn
from penstock.weights.encodings import encode, raw_manifest_of
from penstock.weights.manifest import Manifest, TensorEntry
from penstock.weights.plan import cut_runs
from penstock.weights.quantization import SCHEME_DTYPES, quantize

COLUMNS = 4096
REFERENCE = {"int8": 2.1, "fp8": 2.1}
"""Raw over wire of int8 by channel behind zstd, as measured for the project's references."""


def quantized(size: int, chunk_bytes: int, times: int = 3) -> list[Result]:
    """Of one bfloat16 matrix of about `size` bytes, and of another of which 1.5 % of the weights are a step further."""
    rows = size // (2 * COLUMNS)
    before, after = drawn(rows * COLUMNS * 2, 0.015)
    manifests = [_manifest(version, rows, data, chunk_bytes) for version, data in enumerate((before, after))]
    results = []
    for scheme in SCHEME_DTYPES:
        took = []
        for _ in range(times):
            began = time.perf_counter()
            new = quantize(manifests[1], memoryview(after), scheme)
            full = encode(*new, scheme, None, None)
            took.append(time.perf_counter() - began)
        base = quantize(manifests[0], memoryview(before), scheme)
        delta = encode(*new, f"{scheme}-delta", *base)
        ratio = len(after) / full.manifest.nbytes
        rate = len(after) / statistics.median(took) / 1e9
        results += [
            at_least(f"{scheme}: raw / wire", ratio, REFERENCE[scheme], "x"),
            Result(f"{scheme}: quantize and encode", rate, "GB/s a core", note="of bfloat16"),
            Result(f"{scheme}: raw / wire of a difference", _share(after, delta.manifest), "x", note="1.5 % changed"),
        ]
    return results


def _share(data: bytes, manifest: Manifest) -> float:
    return len(data) / manifest.nbytes if manifest.nbytes else math.inf


def _manifest(version: int, rows: int, data: bytes, chunk_bytes: int) -> Manifest:
    entry = TensorEntry(name="up_proj.weight", dtype="BF16", shape=(rows, COLUMNS), nbytes=len(data), xxh3=0)
    bare = Manifest(run="bench", version=version, codec="raw", base=None, config_json="{}", tensors=(entry,), chunks=())
    return raw_manifest_of(bare, memoryview(data), cut_runs([entry], chunk_bytes))
