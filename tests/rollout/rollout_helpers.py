"""Frames as tests write them, and agents on a virtual clock that draw tokens from nothing but seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.observe.events import Event
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import TRAINER, Decisions, Manager, ManagerConfig
from penstock.sample import Finish
from penstock.wire import (
    AgentHello,
    BatchDone,
    BatchFailed,
    Drain,
    FinishedFrame,
    FleetStatus,
    FrameToManager,
    LoadWeights,
    Sampling,
    StartFrame,
    StopFrame,
    SubmitBatch,
    TokenFrame,
    VersionPublished,
    VersionReady,
    Welcome,
    column,
    column_bytes,
)

STOP_ID = 9
VOCABULARY = 50


def token_of(seed: int, position: int) -> int:
    """What every honest engine draws: never the stop id."""
    return 10 + (seed + 31 * position) % (VOCABULARY - 10)


def logprob_of(seed: int, position: int) -> float:
    return -((seed + position) % 64) / 64


def length_of(seed: int, limit: int) -> int:
    """Tokens of a sample, the stop id included; `limit` or more means that it never stops by itself."""
    return 1 + seed % (limit + 2)


def output_of(seed: int, limit: int) -> tuple[list[int], list[float], Finish]:
    """The whole output of a sample, as an undisturbed engine draws it."""
    length = length_of(seed, limit)
    if length <= limit:
        ids = [token_of(seed, n) for n in range(length - 1)] + [STOP_ID]
        finish = Finish.STOP
    else:
        length, finish = limit, Finish.LENGTH
        ids = [token_of(seed, n) for n in range(limit)]
    return ids, [logprob_of(seed, n) for n in range(length)], finish


def submit(
    batch: str = "train-0",
    prompts: Sequence[Sequence[int]] = ((1, 2, 3),),
    samples_per_prompt: int = 1,
    version: int = 0,
    max_new_tokens: int = 8,
    deadline_s: float = 60.0,
    **changes: object,
) -> SubmitBatch:
    fields: dict[str, object] = {
        "batch": batch,
        "version": version,
        "samples_per_prompt": samples_per_prompt,
        "run_seed": 0,
        "sampling": Sampling(max_new_tokens=max_new_tokens, stop_ids=(STOP_ID,)),
        "prompt_indices": column_bytes(range(len(prompts)), "I"),
        "prompt_ids": column_bytes([token for prompt in prompts for token in prompt], "i"),
        "prompt_lengths": column_bytes([len(prompt) for prompt in prompts], "I"),
        "deadline_s": deadline_s,
    }
    return SubmitBatch(**{**fields, **changes})  # type: ignore[arg-type]


Row = tuple[int, int, Sequence[int], Finish]
"""Lease, start, token ids, finish."""


def tokens(*rows: Row, version: int = 0, causes: dict[int, str] | None = None, **changes: object) -> TokenFrame:
    fields: dict[str, object] = {
        "version": version,
        "leases": column_bytes([row[0] for row in rows], "Q"),
        "starts": column_bytes([row[1] for row in rows], "I"),
        "counts": column_bytes([len(row[2]) for row in rows], "I"),
        "finishes": bytes([row[3] for row in rows]),
        "token_ids": column_bytes([token for row in rows for token in row[2]], "i"),
        "logprobs": column_bytes([-0.5 for row in rows for _ in row[2]], "f"),
        "causes": causes or {},
    }
    return TokenFrame(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class Sequence_:
    """One sequence in a simulated engine."""

    seed: int
    drawn: int
    limit: int
    prefix: list[int]
    prompt: list[int]


@dataclass
class SimulatedAgent:
    """An honest agent: draws what `output_of` says, tells what it drew, forgets what it is told to stop."""

    peer: str
    instance: str = ""
    version: int = -1
    loading: LoadWeights | None = None
    draining: bool = False
    held_off_s: float = 0.0
    context_tokens: int = 1024
    sequences: dict[int, Sequence_] = field(default_factory=dict)
    stop_causes: list[str] = field(default_factory=list)

    def take(self, frame: object) -> None:
        if isinstance(frame, Welcome):
            self.instance = frame.instance
            self.held_off_s = frame.hold_off_s
        elif isinstance(frame, LoadWeights):
            self.loading = frame
        elif isinstance(frame, StopFrame):
            self.stop_causes.append(frame.cause)
            for lease in column(frame.leases, "Q"):
                self.sequences.pop(lease, None)
        elif isinstance(frame, Drain):
            self.draining = True
        elif isinstance(frame, StartFrame):
            assert frame.version == self.version
            self._start(frame)

    def _start(self, frame: StartFrame) -> None:
        prompts, prefixes = column(frame.prompt_ids, "i").tolist(), column(frame.prefix_ids, "i").tolist()
        for lease, seed, prompt, prefix, sampling in zip(
            column(frame.leases, "Q"),
            column(frame.seeds, "Q"),
            column(frame.prompt_lengths, "I"),
            column(frame.prefix_lengths, "I"),
            column(frame.sampling_of, "I"),
            strict=True,
        ):
            limit = frame.samplings[sampling].max_new_tokens
            assert prompt + limit <= self.context_tokens, "there is room for whatever it may come to"
            held = Sequence_(seed, prefix, limit, prefixes[:prefix], prompts[:prompt])
            assert held.prefix == output_of(seed, limit)[0][:prefix], "the prefix is what was drawn before"
            self.sequences[lease] = held
            del prompts[:prompt], prefixes[:prefix]

    def ready(self) -> VersionReady:
        """The load that it was told to do has ended."""
        assert self.loading is not None
        self.version, self.loading = self.loading.version, None
        return VersionReady(
            version=self.version,
            vocab_size=VOCABULARY,
            max_context_tokens=self.context_tokens,
            load_s=0.1,
            bytes_fetched=10,
        )

    def draw(self, leases: Sequence[int], count: int) -> TokenFrame:
        """Up to `count` more tokens of some sequences."""
        rows: list[Row] = []
        logprobs: list[float] = []
        for lease in leases:
            held = self.sequences[lease]
            ids, values, finish = output_of(held.seed, held.limit)
            end = min(held.drawn + count, len(ids))
            rows.append((lease, held.drawn, ids[held.drawn : end], finish if end == len(ids) else Finish.RUNNING))
            logprobs += values[held.drawn : end]
            held.drawn = end
            if end == len(ids):
                del self.sequences[lease]
        return tokens(*rows, version=self.version, logprobs=column_bytes(logprobs, "f"))


@dataclass
class Delivered:
    """One sample as the trainer got it."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    cause: str
    spans: list[tuple[int, int]]


class World:
    """A manager, simulated agents and a trainer that remembers, on a virtual clock."""

    def __init__(self, config: ManagerConfig | None = None) -> None:
        fleet = FleetConfig(heartbeat_s=2.0, load_deadline_s=30.0)
        self.manager = Manager(config or ManagerConfig(fleet=fleet, max_pending_per_instance=2), wall_offset_s=1000.0)
        self.now = 0.0
        self.agents: dict[str, SimulatedAgent] = {}
        self.delivered: dict[tuple[str, int, int], Delivered] = {}
        self.done: dict[str, BatchDone] = {}
        self.failed: dict[str, BatchFailed] = {}
        self.events: list[Event] = []
        self.closed: list[tuple[str, str]] = []
        self.statuses: list[FleetStatus] = []
        self._peers = 0
        self.carry_out(self.manager.on_trainer_connected(self.now))

    # ---- what tests do

    def trainer(self, frame: FrameToManager) -> None:
        self.carry_out(self.manager.on_trainer_frame(frame, self.now))

    def publish(self, version: int) -> None:
        self.trainer(VersionPublished(version=version, source=f"store:{version}"))

    def join(
        self, name: str = "engine", max_running: int = 4, context_tokens: int = 1024, host: str = "here"
    ) -> SimulatedAgent:
        self._peers += 1
        agent = SimulatedAgent(f"peer-{self._peers}", context_tokens=context_tokens)
        self.agents[agent.peer] = agent
        self.carry_out(self.manager.on_agent_connected(agent.peer, self.now))
        hello = AgentHello(
            name=name, engine="simulated", pid=1, host=host, max_running=max_running, max_context_tokens=1024
        )
        self.send(agent, hello)
        return agent

    def join_ready(self, name: str = "engine", max_running: int = 4, context_tokens: int = 1024) -> SimulatedAgent:
        agent = self.join(name, max_running, context_tokens)
        if agent.loading is not None:
            self.send(agent, agent.ready())
        return agent

    def send(self, agent: SimulatedAgent, frame: FrameToManager) -> None:
        self.carry_out(self.manager.on_agent_frame(agent.peer, frame, self.now))

    def lose(self, agent: SimulatedAgent, cause: str = "the connection was cut") -> None:
        self.agents.pop(agent.peer, None)
        self.carry_out(self.manager.on_agent_lost(agent.peer, cause, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.manager.tick(self.now))

    def play(self, agent: SimulatedAgent, count: int = 3) -> None:
        """One frame with a few more tokens of everything that the agent runs."""
        if agent.loading is not None:
            self.send(agent, agent.ready())
        if agent.sequences:
            self.send(agent, agent.draw(list(agent.sequences), count))

    def play_out(self, rounds: int = 1000) -> None:
        """Until no agent has anything to do."""
        for _ in range(rounds):
            busy = [a for a in self.agents.values() if a.sequences or a.loading is not None]
            if not busy:
                return
            for agent in busy:
                if agent.peer in self.agents:
                    self.play(agent)
        raise AssertionError(f"still busy after {rounds} rounds")

    def of_kind(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    # ---- what comes out

    def carry_out(self, decisions: Decisions) -> None:
        self.events += decisions.events
        for peer, frame in decisions.frames:
            if peer != TRAINER:
                if peer in self.agents:
                    self.agents[peer].take(frame)
            elif isinstance(frame, FinishedFrame):
                self._deliver(frame)
            elif isinstance(frame, BatchDone):
                assert frame.batch not in self.done, "a batch ends once"
                self.done[frame.batch] = frame
            elif isinstance(frame, BatchFailed):
                self.failed[frame.batch] = frame
            elif isinstance(frame, FleetStatus):
                self.statuses.append(frame)
        for peer, cause in decisions.close:
            self.closed.append((peer, cause))
            self.agents.pop(peer, None)

    def _deliver(self, frame: FinishedFrame) -> None:
        ids, values = column(frame.token_ids, "i").tolist(), column(frame.logprobs, "f").tolist()
        spans = list(zip(column(frame.span_versions, "I"), column(frame.span_ends, "I"), strict=True))
        rows = zip(
            column(frame.prompts, "I"),
            column(frame.replicas, "I"),
            column(frame.finishes, "B"),
            column(frame.lengths, "I"),
            column(frame.span_counts, "I"),
            strict=True,
        )
        for row, (prompt, replica, finish, length, span_count) in enumerate(rows):
            key = (frame.batch, prompt, replica)
            assert key not in self.delivered, f"{key} came twice"
            self.delivered[key] = Delivered(
                ids[:length], values[:length], Finish(finish), frame.causes.get(row, ""), spans[:span_count]
            )
            del ids[:length], values[:length], spans[:span_count]
        assert not ids
        assert not spans
