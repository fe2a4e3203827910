"""What the manager's journal costs, how fast it is read, and whether it holds.

Throughput is that of `bench manager`'s load with and without a journal, round by round, so that both meet the same
machine. It counts the processor time of the manager's thread and of the journal's own, snapshots included, and syncs
the disk as a real run does. Recovery is measured as a user would wait for it: by the clock, from the first byte.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, at_least, at_most, median
from penstock.bench.journal_kills import Violation, run_story
from penstock.bench.manager_world import World
from penstock.rollout.journal_file import Journal, JournalConfig
from penstock.rollout.manager import Decisions, Manager, ManagerConfig
from penstock.wire import TokenFrame, column_bytes, encode

DESCRIPTION = "the manager's journal: throughput with it against without, recovery time, kills at random bytes"

AGENTS = 256
COMPACT_BYTES = JournalConfig(Path()).compact_bytes
RUNNING = 256
ROW_TOKENS = 8
RATIO_TARGET = 0.85
TOKENS_TARGET = 1_000_000
RECOVERY_TOKENS = 100_000_000
RECOVERY_TARGET_S = 20.0
KILLS = 500
KILLS_A_STORY = 5


def run(quick: bool) -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="penstock-journal-") as place:
        folder = Path(place)
        results = _throughput(folder, repetitions=3 if quick else 7, rounds=6 if quick else 24)
        tokens = RECOVERY_TOKENS // 20 if quick else RECOVERY_TOKENS
        for words, compact_bytes in (("snapshots as usual", COMPACT_BYTES), ("no snapshot at all", 1 << 60)):
            results += _recovery(folder / "recovery", tokens, compact_bytes, words)
        return results + _kills(folder, 100 if quick else KILLS)


# ---- throughput


class _CountingThreads(ThreadPoolExecutor):
    """Adds up the processor time of what it is given."""

    def __init__(self) -> None:
        super().__init__(max_workers=2)
        self.used_s = 0.0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def counted() -> Any:
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.used_s += time.thread_time() - begin

        return super().submit(counted)


class _BareWorld(World):
    """`bench manager`'s world, beside another one's threads."""

    processor_s = staticmethod(time.thread_time)


class _JournaledWorld(_BareWorld):
    """The same with a journal, whose work is in the time that is measured."""

    def __init__(self, folder: Path, compact_bytes: int) -> None:
        self._folder, self._compact_bytes = folder, compact_bytes
        self.threads = _CountingThreads()
        self.trouble = ""
        super().__init__(AGENTS, RUNNING)

    def make_manager(self) -> Manager:
        self.manager = Manager(ManagerConfig(max_pending_per_instance=0))
        config = JournalConfig(self._folder, compact_bytes=self._compact_bytes)
        self.journal = Journal(config, self.manager.snapshot, self._changed, threads=self.threads)
        self.manager.restore(self.journal.open(0.0), 0.0)
        self.journal.start(self.manager.epoch)
        return self.manager

    def _changed(self, running: bool, message: str) -> None:
        self.trouble = self.trouble or message
        self.manager.on_journal(running, message, 0.0)

    def write(self, decisions: Decisions) -> None:
        # As the server does, where all agents' frames have come in: what nobody hears of shares a call.
        self.journal.gather(decisions.records)
        if decisions.heard:
            self.journal.flush()

    def play(self, row_tokens: int, length: int) -> tuple[float, int]:
        took_s, tokens = super().play(row_tokens, length)
        begin = time.thread_time()
        self.journal.tick(time.monotonic())
        return took_s + time.thread_time() - begin, tokens

    def end(self) -> float:
        """Returns the processor seconds of the journal's threads, which `play` has not counted.

        Raises RuntimeError where the disk failed: what was measured then is no journal.
        """
        self.journal.close()
        if self.trouble:
            raise RuntimeError(self.trouble)
        return self.threads.used_s


def _throughput(folder: Path, repetitions: int, rounds: int) -> list[Result]:
    bare, journaled, snapshots = [], [], 0
    for number in range(repetitions):
        place = folder / f"throughput-{number}"
        # In a run as short as this, so that a snapshot is written while it is measured.
        world = _JournaledWorld(place, COMPACT_BYTES // 4)
        without_s, with_it_s = _seconds((_BareWorld(AGENTS, RUNNING), world), rounds)
        tokens = rounds * AGENTS * RUNNING * ROW_TOKENS
        bare.append(tokens / without_s)
        journaled.append(tokens / (with_it_s + world.end()))
        snapshots += sum(path.name.startswith("snapshot") for path in place.iterdir())
        shutil.rmtree(place)
        del world
        gc.collect()
    load = f"{AGENTS} agents x {RUNNING} samples, {ROW_TOKENS} tokens a row"
    note = f"round by round in turns; {snapshots} of {repetitions} wrote snapshots meanwhile"
    ratios = [with_it / without for with_it, without in zip(journaled, bare, strict=True)]
    note += f"; from {min(ratios):.2f} to {max(ratios):.2f}"
    return [
        Result(f"tokens tracked without a journal, {load}", median(bare), "tokens/s"),
        at_least(f"the same with a journal, fsync = interval, {load}", median(journaled), TOKENS_TARGET, "tokens/s"),
        at_least("with a journal against without", median(ratios), RATIO_TARGET, "x", note=note),
    ]


def _seconds(worlds: Sequence[World], rounds: int) -> list[float]:
    """Processor seconds of each world's own thread. They play in turns: other load meets them all."""
    for world in worlds:
        world.submit("bench", prompts=AGENTS * 32, samples_per_prompt=8, length=1 << 20)
    seconds, tokens = [0.0] * len(worlds), [0] * len(worlds)
    for done in range(rounds):
        for number in range(len(worlds)):
            # Each goes first as often as last.
            which = (number + done) % len(worlds)
            took_s, tracked = worlds[which].play(ROW_TOKENS, 1 << 20)
            seconds[which] += took_s
            tokens[which] += tracked
    if set(tokens) != {rounds * AGENTS * RUNNING * ROW_TOKENS}:
        raise RuntimeError(f"{tokens} tokens were tracked in {rounds} rounds")
    return seconds


# ---- recovery


def _recovery(folder: Path, tokens: int, compact_bytes: int, words: str) -> list[Result]:
    """Seconds until a manager has the state again that another one left."""
    samples = AGENTS * RUNNING
    _fill(folder, tokens, compact_bytes)
    gc.collect()
    nbytes = sum(path.stat().st_size for path in folder.iterdir())
    manager = Manager(ManagerConfig())
    journal = Journal(JournalConfig(folder), manager.snapshot, lambda running, message: None)
    begin = time.perf_counter()
    recovered = journal.open(0.0)
    manager.restore(recovered, 0.0)
    took_s = time.perf_counter() - begin
    journal.close()
    waiting = manager.tracker.queued
    if waiting != samples or recovered.tokens < tokens:
        raise RuntimeError(f"{waiting} samples with {recovered.tokens} tokens came back")
    shutil.rmtree(folder)
    what = f"recovery of {samples:,} samples with {recovered.tokens / 1e6:.0f} M tokens, {words}"
    bound_s = RECOVERY_TARGET_S * min(1.0, tokens / RECOVERY_TOKENS)
    return [at_most(what, took_s, bound_s, "s", note=f"by the clock; {nbytes / 2**20:,.0f} MiB on the disk")]


def _fill(folder: Path, tokens: int, compact_bytes: int) -> None:
    world = _JournaledWorld(folder, compact_bytes)
    world.submit("bench", prompts=AGENTS * 32, samples_per_prompt=8, length=1 << 20)
    row = RUNNING * ROW_TOKENS
    ids = array("i", [(7 * k) % 32_000 for k in range(row)]).tobytes()
    values = array("f", [-0.01 * (k % 300) for k in range(row)]).tobytes()
    frames = {
        agent.peer: TokenFrame(
            version=1,
            leases=column_bytes(agent.drawn, "Q"),
            starts=b"",
            counts=column_bytes([ROW_TOKENS] * RUNNING, "I"),
            finishes=bytes(RUNNING),
            token_ids=ids,
            logprobs=values,
        )
        for agent in world.agents.values()
    }
    for done in range(0, -(-tokens // (AGENTS * row)) * ROW_TOKENS, ROW_TOKENS):
        starts = column_bytes([done] * RUNNING, "I")
        for peer, frame in frames.items():
            frame.starts = starts
            world.agent(peer, encode(frame))
        world.journal.tick(time.monotonic())
    world.end()


# ---- kills


def _kills(folder: Path, kills: int) -> list[Result]:
    survived, violations = 0, []
    for seed in range(kills // KILLS_A_STORY):
        try:
            survived += run_story(folder, seed, KILLS_A_STORY).kills
        except Violation as violation:
            violations.append(f"seed {seed}: {violation}")
    return [
        at_least("kills at a random byte of what the manager writes", survived, kills, "kills"),
        at_most(
            "of which it came back to a state that no agent had reached, lost a sample or sent one twice",
            len(violations),
            0,
            "kills",
            note="; ".join(violations[:3]),
        ),
    ]
