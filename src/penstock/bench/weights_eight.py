"""Eight instances behind one shaped sender against one alone: as this machine has it, and with time dilated.

Eight instances share this machine's cores, so that what one does in a moment takes eight of them several, whatever the
design. In the dilated measurement link and delay are `FACTOR` times slower, and each instance has a fixed share of one
core, whether one pulls or eight: in the slowed time each is a machine of `FACTOR` * `SHARE` cores, from which no other
instance takes anything (Gupta et al., "To Infinity and Beyond: Time-Warped Network Emulation", NSDI 2006; DieCast, NSDI
2008). Memory's bandwidth and the deadlines within the code are not dilated.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.common import Result, at_most, skipped
from penstock.bench.processor_share import check_that_it_binds, processor_share
from penstock.bench.weights_link import (
    CHUNK_BYTES,
    INSTANCE,
    LATENCY_S,
    PROXIES,
    ROUND_TRIP_S,
    THERE,
    TOKEN,
    ShapedLink,
    StoreProcess,
    TalkingProcess,
    files_of,
)
from penstock.errors import PenstockError
from penstock.instance.loading import WeightLoader

__all__ = ["eight_and_one"]

INSTANCES = 8
ROUNDS = 5
"""Of one and of eight in turn, after one of each that nobody counts: machines of a run have pulled before."""
ROUNDS_VERSIONS = 2 * (1 + ROUNDS)
FACTOR = 10.0
SHARE = 0.1
"""Of a core, for an instance: eight have 0.8 of this machine's two cores, and the rest is for the link."""
SENDER_SHARE = 0.4
KINDS = (("delta", ""), ("delta", "shm"), ("raw", ""))
TARGET = 1.5


@dataclass(frozen=True, slots=True)
class _Pulls:
    """What a set of rounds took, in seconds of this machine's clock."""

    ones_s: list[float]
    eights_s: list[float]
    trainer_bytes: int
    """For eight."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.eights_s) / statistics.median(self.ones_s)

    def note(self, factor: float = 1.0) -> str:
        one_s, eight_s = (statistics.median(times) / factor for times in (self.ones_s, self.eights_s))
        return f"{one_s:.3f} s and {eight_s:.3f} s; the trainer sent {self.trainer_bytes / 1e6:.1f} MB for {INSTANCES}"


def eight_and_one(
    folder: Path, link: ShapedLink, rate_mbit_s: float, before: bytes, after: bytes, bounds: bool
) -> list[Result]:
    """With `bounds`, held to the target and measured in dilated time too."""
    results = []
    for codec, ways in KINDS:
        results += _measured(folder, link, rate_mbit_s, codec, ways, before, after, bounds)
    return results


def _measured(
    folder: Path, link: ShapedLink, rate_mbit_s: float, codec: str, ways: str, before: bytes, after: bytes, bounds: bool
) -> list[Result]:
    """Each round has a version of its own, `before` and `after` in turn, so that nobody has anything of it yet.

    With `ways` the instances share this machine's memory; without, each has a copy, as on machines of their own.
    """
    # Those of one machine share its cores: there is nothing to be dilated.
    dilates = bounds and not ways
    versions = ROUNDS_VERSIONS * (2 if dilates else 1)
    old, new = files_of(folder, "eight", before, after)
    name = f"{INSTANCES} instances / 1 at {rate_mbit_s:g} Mb/s, {codec}{', one copy in shared memory' if ways else ''}"
    size = f"{len(after) / 2**20:.0f} MiB, each instance a process that verifies: "
    with contextlib.ExitStack() as parts:
        files = [(old, new)[number % 2] for number in range(1 + versions)]
        store = StoreProcess(files, CHUNK_BYTES, link.namespace, THERE)
        parts.callback(store.kill)
        asyncio.run(_encode_ahead(store.address, codec, versions))
        proxies = TalkingProcess(PROXIES, store.address, str(INSTANCES))
        parts.callback(proxies.kill)
        instances = []
        for address in proxies.said().split():
            instances.append(TalkingProcess(INSTANCE, address, codec, ways))
            parts.callback(instances[-1].kill)
        for instance in instances:
            instance.said()
        _delay(proxies, ROUND_TRIP_S)
        found = _rounds(instances, proxies, 1)
        results = [Result(name, found.ratio, "x", note=size + found.note())]
        if bounds:
            results = [at_most(name, found.ratio, TARGET, "x", size + found.note())]
        if dilates:
            name += f", time dilated {FACTOR:g} times"
            try:
                bound, found = _dilated(link, rate_mbit_s, store, proxies, instances)
            except PenstockError as error:
                return [*results, skipped(name, "x", str(error))]
            note = (
                f"in dilated time {found.note(FACTOR)}; {rate_mbit_s / FACTOR:g} Mb/s, {ROUND_TRIP_S * FACTOR:g} s, "
                f"{SHARE:g} of a core an instance (a busy process got {bound:.3f}), {SENDER_SHARE:g} for the sender"
            )
            results.append(at_most(name, found.ratio, TARGET, "x", note))
    return results


def _dilated(
    link: ShapedLink, rate_mbit_s: float, store: StoreProcess, proxies: TalkingProcess, instances: list[TalkingProcess]
) -> tuple[float, _Pulls]:
    """The share that a busy process got where an instance is to be, and the rounds. Raises PenstockError where no
    quota can be set or none binds."""
    with contextlib.ExitStack() as parts:
        groups = [parts.enter_context(processor_share(SHARE)) for _ in instances]
        bound = check_that_it_binds(groups[0])
        parts.enter_context(processor_share(SENDER_SHARE)).hold(store.pid)
        for group, instance in zip(groups, instances):
            group.hold(instance.pid)
        link.shape(rate_mbit_s / FACTOR, LATENCY_S * FACTOR)
        parts.callback(link.shape, rate_mbit_s)
        _delay(proxies, ROUND_TRIP_S * FACTOR)
        return bound, _rounds(instances, proxies, 1 + ROUNDS_VERSIONS)


def _delay(proxies: TalkingProcess, round_trip_s: float) -> None:
    proxies.tell(str(round_trip_s / 2))
    proxies.said()


def _rounds(instances: list[TalkingProcess], proxies: TalkingProcess, version: int) -> _Pulls:
    ones: list[float] = []
    eights: list[float] = []
    sent = 0
    for number in range(version, version + ROUNDS_VERSIONS):
        alone = (number - version) % 2 == 0
        before = _sent(proxies)
        (ones if alone else eights).append(_round(instances[:1] if alone else instances, number))
        sent = _sent(proxies) - before
        if alone:
            # The others get it too, unmeasured, and serve it before the next one comes.
            _round(instances[1:], number)
        for instance in instances:
            instance.said()
    return _Pulls(ones[1:], eights[1:], sent)


def _round(instances: list[TalkingProcess], version: int) -> float:
    began = time.monotonic()
    for instance in instances:
        instance.tell(str(version))
    return max(float(instance.said()) for instance in instances) - began


def _sent(proxies: TalkingProcess) -> int:
    """Bytes of the sender's, so far."""
    proxies.tell("")
    return int(proxies.said())


async def _encode_ahead(address: str, codec: str, versions: int) -> None:
    if codec == "raw":
        return
    loader = WeightLoader(TOKEN, codec=codec)
    loader.serves(await loader.pull(address, 0, 300))
    for version in range(1, versions + 1):
        loader.serves(await loader.pull(address, version, 300))
    await loader.close()
