"""A difference that is fetched while it is encoded, sender and instance on machines of their own: with time dilated.

On this machine the encoder, the proxy and the instance share the same cores, and what overlaps only takes longer; see
`weights_eight` for what dilating is and is not.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

from penstock.bench.common import Result, skipped
from penstock.bench.processor_share import check_that_it_binds, processor_share
from penstock.bench.weights_eight import FACTOR
from penstock.bench.weights_link import (
    CHUNK_BYTES,
    INSTANCE,
    LATENCY_S,
    PROXIES,
    ROUND_TRIP_S,
    THERE,
    ShapedLink,
    StoreProcess,
    TalkingProcess,
)
from penstock.errors import PenstockError

__all__ = ["beside_its_encoding"]

SHARE = 0.2
"""Of a core: two cores of dilated time, for the sender and for the instance."""
PULLS = 4
"""Of versions of their own; the first is thrown away."""


def beside_its_encoding(link: ShapedLink, rate_mbit_s: float, pair: list[Path], raw_s: float) -> list[Result]:
    """`pair`: files of both versions. `raw_s`: what the newer one takes raw."""
    old, new = pair
    names = [f"the same{what}, time dilated {FACTOR:g} times" for what in (" with the encoding", "")]
    with contextlib.ExitStack() as parts:
        files = [(old, new)[number % 2] for number in range(1 + PULLS)]
        store = StoreProcess(files, CHUNK_BYTES, link.namespace, THERE)
        parts.callback(store.kill)
        proxies = TalkingProcess(PROXIES, store.address, "1")
        parts.callback(proxies.kill)
        address = proxies.said()
        # Encoded when the first one asks for it; for the second it is there.
        instances = [TalkingProcess(INSTANCE, address, "delta", "", "alone") for _ in names]
        for instance in instances:
            parts.callback(instance.kill)
            instance.said()
        try:
            for process_id in (store.pid, *(instance.pid for instance in instances)):
                group = parts.enter_context(processor_share(SHARE))
                bound = check_that_it_binds(group)
                group.hold(process_id)
        except PenstockError as error:
            return [skipped(name, "x", str(error)) for name in names]
        link.shape(rate_mbit_s / FACTOR, LATENCY_S * FACTOR)
        parts.callback(link.shape, rate_mbit_s)
        proxies.tell(str(ROUND_TRIP_S * FACTOR / 2))
        proxies.said()
        took = [[_timed(one, version) / FACTOR for version in range(1, PULLS + 1)] for one in instances]
    note = f"{SHARE:g} of a core for the sender and for the instance (a busy process got {bound:.3f})"
    medians = [statistics.median(times[1:]) for times in took]
    return [
        Result(name, raw_s / one_s, "x", note=f"{one_s:.3f} s of dilated time; {note}")
        for name, one_s in zip(names, medians, strict=True)
    ]


def _timed(instance: TalkingProcess, version: int) -> float:
    began = time.monotonic()
    instance.tell(str(version))
    there = float(instance.said())
    instance.said()
    return there - began
