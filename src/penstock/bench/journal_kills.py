"""A manager that is killed at a random byte of what it writes, again and again, and what it comes back with.

One seed is one life story: honest agents draw tokens that are a function of sample and position, a trainer takes
samples and is sometimes lost or started anew, and the manager's disk stops at a random byte, in the middle of a record
or of a snapshot. Everything is on a virtual clock and in one thread, so that a seed always tells the same story.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
from array import array
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.rollout.journal_file import Fsync, Journal, JournalConfig
from penstock.rollout.journal_replay import Recovered
from penstock.rollout.journal_segments import Disk
from penstock.rollout.manager import TRAINER, Decisions, Manager, ManagerConfig
from penstock.rollout.tracker import EPOCH_SHIFT
from penstock.sample import Finish, SampleId, sample_seed
from penstock.wire import (
    AgentHello,
    BatchDone,
    FinishedFrame,
    LoadWeights,
    ReleaseBatch,
    Sampling,
    StartFrame,
    StopFrame,
    SubmitBatch,
    TokenFrame,
    TrainerHello,
    VersionPublished,
    VersionReady,
    column,
    column_bytes,
)

__all__ = ["InlineExecutor", "Killed", "MortalDisk", "Story", "run_story"]

VOCABULARY = 500
LIMIT = 24
STOP_ID = 9
GRACE_S = 1e6


class Killed(BaseException):
    """The process is no more; nothing that would have followed takes place."""


class MortalDisk(Disk):
    """Writes so many bytes and no more: the one that crosses them is cut short, and the process dies."""

    def __init__(self, left: int) -> None:
        self.left = left

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        if len(data) > self.left:
            os.write(descriptor, data[: self.left])
            raise Killed
        self.left -= len(data)
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        """The file outlives the process by itself."""


class InlineExecutor(Executor):
    """Does at once what it is given, so that a story has one thread."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits for it gets it
            future.set_exception(error)
        return future


class Violation(PenstockError):
    """Something that a journal promises did not hold."""


def truth(seed: int) -> tuple[list[int], Finish]:
    """The whole output of a sample, as every honest engine draws it."""
    length = 1 + seed % (LIMIT + 4)
    if length <= LIMIT:
        return [10 + (seed + 31 * n) % (VOCABULARY - 10) for n in range(length - 1)] + [STOP_ID], Finish.STOP
    return [10 + (seed + 31 * n) % (VOCABULARY - 10) for n in range(LIMIT)], Finish.LENGTH


def logprobs_of(seed: int, ids: list[int]) -> list[float]:
    return [-((seed + n) % 64) / 64 for n in range(len(ids))]


@dataclass
class _Agent:
    sequences: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Lease to the sample's seed and the tokens drawn."""


@dataclass
class Story:
    """One run of a manager that is killed and started again. Raises Violation."""

    folder: Path
    seed: int
    fsync: Fsync = "interval"
    kills: int = 0
    tokens_drawn: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.now = 0.0
        self.session = "first"
        self.submitted: dict[str, SubmitBatch] = {}
        self.delivered: dict[SampleId, list[int]] = {}
        self.done: set[str] = set()
        self.released: set[str] = set()
        self.reached: dict[SampleId, tuple[int, ...]] = {}
        """Lengths of each unfinished or finished sample since the last answer that got out."""
        self.epoch = 0
        """Of the last manager that gave leases."""
        self.names = 0
        self._start(self._life())

    # ---- the manager's lives

    def _life(self) -> int:
        """Bytes until it is killed."""
        return int(self.random.expovariate(1 / 6000))

    def _start(self, life: int) -> None:
        # It comes up in one piece, or else in the next try.
        while True:
            try:
                self._open(life)
                self._connect()
                return
            except Killed:
                self._die()
                life = self._life() + 2000

    def _open(self, life: int) -> None:
        self.agents: dict[str, _Agent] = {}
        config = ManagerConfig(max_pending_per_instance=2, trainer_grace_s=GRACE_S, max_strikes=1 << 30)
        self.manager = Manager(config)
        journal = JournalConfig(self.folder, self.fsync, compact_bytes=1500)
        self.journal = Journal(
            journal,
            self.manager.snapshot,
            lambda running, message: self.carry_out(self.manager.on_journal(running, message, self.now)),
            disk=MortalDisk(life),
            clock=lambda: self.now,
            threads=InlineExecutor(),
        )
        recovered = self.journal.open(self.now)
        self._check(recovered)
        self.carry_out(self.manager.restore(recovered, self.now))
        if self.manager.epoch <= self.epoch:
            raise Violation(f"epoch {self.manager.epoch} comes after {self.epoch}")
        self.journal.start(self.manager.epoch)
        self.epoch = self.manager.epoch

    def _connect(self) -> None:
        """Agents and trainer come back; the trainer says what it has."""
        for _ in range(2):
            self._join()
        manager, now = self.manager, self.now
        self.carry_out(manager.on_trainer_connected(now))
        still_open = [name for name in self.submitted if name not in self.done]
        self.trainer(TrainerHello(name="t", pid=1, session=self.session, open_batches=tuple(self.submitted)))
        self.trainer(VersionPublished(version=1, source="store:1", digest="weights"))
        for name in still_open:
            taken = [sample for sample in self.delivered if sample.batch == name]
            self.trainer(_with_taken(self.submitted[name], [(sample.prompt, sample.replica) for sample in taken]))

    def _die(self) -> None:
        self.kills += 1
        lock = self.journal._lock
        if lock is not None:
            lock.close()
        writer = self.journal._writer
        if writer is not None:
            writer.close()

    def _check(self, recovered: Recovered) -> None:
        """Each sample is at a length that it had at the last answer or at the kill, with the tokens of the truth."""
        found: dict[SampleId, int] = {}
        for batch in recovered.batches:
            if batch.name in self.released:
                # Its release was on its way; whoever comes back will not ask for it.
                continue
            if batch.name not in self.submitted:
                raise Violation(f"batch {batch.name} was never submitted")
            for sample in [*batch.moved, *batch.suspects, *batch.held.values()]:
                whole, finish = truth(sample.seed)
                ids = array("i", bytes(sample.tokens)).tolist()
                values = array("f", bytes(sample.logprobs)).tolist()
                if ids != whole[: len(ids)] or values != logprobs_of(sample.seed, ids):
                    raise Violation(f"{sample.id} has other tokens than any engine drew")
                if sample.finish and (len(ids) != len(whole) or sample.finish is not finish):
                    raise Violation(f"{sample.id} is finished after {len(ids)} of {len(whole)} tokens")
                found[sample.id] = len(ids)
        for sample_id, lengths in self.reached.items():
            # One that was killed before it wrote a release down took the batch up again, and was killed once more.
            if sample_id.batch not in self.released and found.get(sample_id, 0) not in lengths:
                raise Violation(f"{sample_id} is at {found.get(sample_id, 0)} tokens and was at {lengths}")
        for sample_id in found:
            if sample_id not in self.reached and found[sample_id]:
                raise Violation(f"{sample_id} has {found[sample_id]} tokens from nowhere")

    def carry_out(self, decisions: Decisions) -> None:
        """As the server does: first the journal, then whoever is to hear."""
        lengths = self._lengths()
        self.reached = {sample: (*self.reached.get(sample, (0,)), length) for sample, length in lengths.items()}
        self.journal.gather(decisions.records)
        # The server's loop comes to write what nobody hears of at any time.
        if decisions.heard or self.random.random() < 0.3:
            self.journal.flush()
            self.reached = {sample: (length,) for sample, length in lengths.items()}
        for peer, frame in decisions.frames:
            if peer == TRAINER:
                self._hear(frame)
            elif peer in self.agents:
                self._take(peer, frame)
        for peer, _ in decisions.close:
            self.agents.pop(peer, None)

    def _lengths(self) -> dict[SampleId, int]:
        tracker = self.manager.tracker
        return {
            sample.id: sample.length
            for batch in self.manager.trainer.every_batch()
            for sample in (*batch.held.values(), *tracker.unfinished_of(batch))
        }

    # ---- agents and trainer

    def _join(self) -> None:
        self.names += 1
        peer = f"agent-{self.names}"
        self.agents[peer] = _Agent()
        self.carry_out(self.manager.on_agent_connected(peer, self.now))
        hello = AgentHello(name=peer, engine="x", pid=1, host="h", max_running=6, max_context_tokens=256)
        self.carry_out(self.manager.on_agent_frame(peer, hello, self.now))

    def _take(self, peer: str, frame: object) -> None:
        agent = self.agents[peer]
        if isinstance(frame, LoadWeights):
            ready = VersionReady(
                version=frame.version, vocab_size=VOCABULARY, max_context_tokens=256, load_s=0, bytes_fetched=0
            )
            self.carry_out(self.manager.on_agent_frame(peer, ready, self.now))
        elif isinstance(frame, StopFrame):
            for lease in column(frame.leases, "Q"):
                agent.sequences.pop(lease, None)
        elif isinstance(frame, StartFrame):
            for lease, seed, prefix in zip(
                column(frame.leases, "Q"), column(frame.seeds, "Q"), column(frame.prefix_lengths, "I"), strict=True
            ):
                if lease >> EPOCH_SHIFT != self.manager.epoch:
                    raise Violation(f"lease {lease} is not of epoch {self.manager.epoch}")
                agent.sequences[lease] = seed, prefix

    def trainer(self, frame: Any) -> None:
        self.carry_out(self.manager.on_trainer_frame(frame, self.now))

    def _hear(self, frame: object) -> None:
        if isinstance(frame, FinishedFrame):
            ids = column(frame.token_ids, "i").tolist()
            for prompt, replica, length in zip(
                column(frame.prompts, "I"), column(frame.replicas, "I"), column(frame.lengths, "I"), strict=True
            ):
                sample = SampleId(frame.batch, prompt, replica)
                if sample in self.delivered:
                    raise Violation(f"{sample} was delivered twice")
                self.delivered[sample] = ids[:length]
                if ids[:length] != truth(sample_seed(0, sample))[0]:
                    raise Violation(f"{sample} was delivered with other tokens than any engine drew")
                del ids[:length]
        elif isinstance(frame, BatchDone):
            self.done.add(frame.batch)

    # ---- what happens

    def step(self) -> None:
        """One thing of many. Ends in a manager that is there."""

        def one() -> None:
            self._one_of(
                (self.draw, 12),
                (self.submit, 1),
                (self.release, 1),
                (self.lose_agent, 1),
                (self.another_trainer, 0.3),
            )

        self.play(one)

    def play(self, act: Callable[[], None]) -> None:
        """Something happens and time passes; a manager that dies of it is started again."""
        self.now += self.random.random()
        try:
            act()
            self.carry_out(self.manager.tick(self.now))
            self.journal.tick(self.now)
        except Killed:
            self._die()
            self._start(self._life())

    def finish(self) -> None:
        """Nobody is killed any more: every sample asked for must come, once."""
        disk = self.journal._disk
        if isinstance(disk, MortalDisk):
            disk.left = 1 << 40
        for _ in range(5000):
            if set(self.submitted) <= self.done:
                break
            self.now += 0.1
            self.draw()
            self.carry_out(self.manager.tick(self.now))
        for name, frame in self.submitted.items():
            asked = len(frame.prompt_indices) // 4 * frame.samples_per_prompt
            came = sum(sample.batch == name for sample in self.delivered)
            if came != asked:
                raise Violation(f"{came} of {asked} samples of batch {name} came")
        self.journal.close()

    def _one_of(self, *choices: tuple[Callable[[], None], float]) -> None:
        calls, weights = zip(*choices, strict=True)
        self.random.choices(calls, weights)[0]()

    def draw(self) -> None:
        busy = [peer for peer, agent in self.agents.items() if agent.sequences]
        if not busy:
            if len(self.agents) < 2:
                self._join()
            return
        peer = self.random.choice(busy)
        agent = self.agents[peer]
        rows: list[tuple[int, int, list[int], list[float], Finish]] = []
        for lease, (seed, drawn) in list(agent.sequences.items()):
            whole, finish = truth(seed)
            ids = whole[drawn : drawn + self.random.randint(1, 6)]
            ended = drawn + len(ids) == len(whole)
            values = logprobs_of(seed, whole)[drawn : drawn + len(ids)]
            rows.append((lease, drawn, ids, values, finish if ended else Finish.RUNNING))
            if ended:
                del agent.sequences[lease]
            else:
                agent.sequences[lease] = seed, drawn + len(ids)
        self.tokens_drawn += sum(len(ids) for _, _, ids, _, _ in rows)
        frame = TokenFrame(
            version=1,
            leases=column_bytes([row[0] for row in rows], "Q"),
            starts=column_bytes([row[1] for row in rows], "I"),
            counts=column_bytes([len(row[2]) for row in rows], "I"),
            finishes=bytes([row[4] for row in rows]),
            token_ids=column_bytes([token for row in rows for token in row[2]], "i"),
            logprobs=column_bytes([value for row in rows for value in row[3]], "f"),
        )
        self.carry_out(self.manager.on_agent_frame(peer, frame, self.now))

    def submit(self) -> None:
        if len(self.submitted) - len(self.done & self.submitted.keys()) >= 3:
            return
        self.names += 1
        prompts = self.random.randint(1, 5)
        frame = SubmitBatch(
            batch=f"batch-{self.names}",
            version=1,
            samples_per_prompt=self.random.randint(1, 4),
            run_seed=0,
            sampling=Sampling(max_new_tokens=LIMIT, stop_ids=(STOP_ID,)),
            prompt_indices=column_bytes(range(prompts), "I"),
            prompt_ids=column_bytes([k % VOCABULARY for k in range(3 * prompts)], "i"),
            prompt_lengths=column_bytes([3] * prompts, "I"),
            deadline_s=1e6,
        )
        # Its trainer counts on it from the moment that it is on its way.
        self.submitted[frame.batch] = frame
        self.trainer(frame)

    def release(self) -> None:
        for name in [name for name in self.submitted if name in self.done]:
            del self.submitted[name]
            self.delivered = {sample: ids for sample, ids in self.delivered.items() if sample.batch != name}
            self.done.discard(name)
            self.released.add(name)
            self.trainer(ReleaseBatch(batch=name))
            return

    def lose_agent(self) -> None:
        if not self.agents:
            return
        peer = self.random.choice(list(self.agents))
        del self.agents[peer]
        self.carry_out(self.manager.on_agent_lost(peer, "cut", self.now))

    def another_trainer(self) -> None:
        """The trainer is killed and resumed: it has nothing, and asks for its batches again."""
        self.carry_out(self.manager.on_trainer_lost("killed", self.now))
        self.session = f"session-{self.random.random()}"
        self.delivered.clear()
        self.done.clear()
        self.carry_out(self.manager.on_trainer_connected(self.now))
        self.trainer(TrainerHello(name="t", pid=1, session=self.session))
        self.trainer(VersionPublished(version=1, source="store:2", digest="weights"))
        for frame in list(self.submitted.values()):
            self.trainer(frame)


def _with_taken(frame: SubmitBatch, taken: list[tuple[int, int]]) -> SubmitBatch:
    return msgspec.structs.replace(
        frame,
        taken_prompts=column_bytes([prompt for prompt, _ in taken], "I"),
        taken_replicas=column_bytes([replica for _, replica in taken], "I"),
    )


def run_story(folder: Path, seed: int, kills: int = 1, steps: int = 4000) -> Story:
    """A story with at least `kills` kills, told to its end. Raises Violation."""
    place = folder / f"story-{seed}-{secrets.token_hex(4)}"
    fsync: tuple[Fsync, ...] = ("never", "interval", "always")
    story = Story(place, seed, fsync[seed % 3])
    for _ in range(steps):
        if story.kills >= kills:
            break
        story.step()
    story.finish()
    shutil.rmtree(place)
    return story
