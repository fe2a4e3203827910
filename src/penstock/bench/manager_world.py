"""A fleet of simulated agents around a pure `Manager`: what the manager's benchmarks drive. Measures nothing itself."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from penstock.rollout.manager import Decisions, Manager, ManagerConfig
from penstock.sample import Finish
from penstock.wire import (
    AgentHello,
    FinishedFrame,
    FrameFromManager,
    LoadWeights,
    ReleaseBatch,
    Sampling,
    StartFrame,
    SubmitBatch,
    TokenFrame,
    TrainerHello,
    VersionPublished,
    VersionReady,
    column,
    column_bytes,
    decode_to_manager,
    encode,
)

VOCABULARY = 32_000
PROMPT_TOKENS = 64


@dataclass(slots=True)
class FrameMaker:
    """What an engine knows of its sequences: for each lease, how many tokens it has drawn."""

    peer: str
    drawn: dict[int, int] = field(default_factory=dict)

    def next_frame(self, row_tokens: int, length: int) -> bytes:
        """Up to `row_tokens` more tokens of every sequence; those that reach `length` finish."""
        leases, starts, counts, finishes = array("Q"), array("I"), array("I"), bytearray()
        for lease, drawn in self.drawn.items():
            count = min(row_tokens, length - drawn)
            leases.append(lease)
            starts.append(drawn)
            counts.append(count)
            finishes.append(Finish.LENGTH if drawn + count == length else Finish.RUNNING)
        tokens = sum(counts)
        self.drawn = {lease: drawn + row_tokens for lease, drawn in self.drawn.items() if drawn + row_tokens < length}
        frame = TokenFrame(
            version=1,
            leases=leases.tobytes(),
            starts=starts.tobytes(),
            counts=counts.tobytes(),
            finishes=bytes(finishes),
            token_ids=array("i", [(7 * k) % VOCABULARY for k in range(tokens)]).tobytes(),
            logprobs=array("f", [-0.01 * (k % 300) for k in range(tokens)]).tobytes(),
        )
        return encode(frame)


def hello(name: str, max_running: int) -> AgentHello:
    return AgentHello(
        name=name, engine="bench", pid=1, host="bench", max_running=max_running, max_context_tokens=1 << 21
    )


def ready(version: int) -> VersionReady:
    return VersionReady(version=version, vocab_size=VOCABULARY, max_context_tokens=1 << 21, load_s=0, bytes_fetched=0)


class World:
    """A manager with agents that are ready, on a clock that only the rounds move."""

    processor_s = staticmethod(time.process_time)

    def __init__(self, agents: int, max_running: int = 256) -> None:
        self.manager = self.make_manager()
        self.agents = {f"agent-{k}": FrameMaker(f"agent-{k}") for k in range(agents)}
        self.now = 0.0
        self.finished = 0
        self.frames: list[FrameFromManager] = []
        self._take(self.manager.on_trainer_connected(0.0))
        self.trainer(TrainerHello(name="bench", pid=1))
        for peer in self.agents:
            self._take(self.manager.on_agent_connected(peer, 0.0))
            self.agent(peer, encode(hello(peer, max_running)))
        self.trainer(VersionPublished(version=1, source="bench:1"))

    def make_manager(self) -> Manager:
        return Manager(ManagerConfig(max_pending_per_instance=0))

    def write(self, decisions: Decisions) -> None:
        """What a journal would be given; here there is none."""

    def trainer(self, frame: TrainerHello | VersionPublished | SubmitBatch | ReleaseBatch) -> None:
        decisions = self.manager.on_trainer_frame(frame, self.now)
        self.write(decisions)
        self._take(decisions)

    def submit(
        self,
        name: str,
        prompts: int,
        samples_per_prompt: int,
        length: int,
        stop_id: int | None = None,
        first_prompt: int = 0,
    ) -> float:
        """Returns the processor seconds from the trainer's bytes to the agents'."""
        frame = SubmitBatch(
            batch=name,
            version=1,
            samples_per_prompt=samples_per_prompt,
            run_seed=0,
            sampling=Sampling(max_new_tokens=length, stop_ids=() if stop_id is None else (stop_id,)),
            prompt_indices=column_bytes(range(first_prompt, first_prompt + prompts), "I"),
            prompt_ids=array("i", range(PROMPT_TOKENS)).tobytes() * prompts,
            prompt_lengths=column_bytes([PROMPT_TOKENS] * prompts, "I"),
            deadline_s=1e6,
        )
        data = encode(frame)
        begin = time.process_time()
        decisions = self.manager.on_trainer_frame(decode_to_manager(data), self.now)
        self.write(decisions)
        answers = [encode(answer) for _, answer in decisions.frames]
        took_s = time.process_time() - begin
        del answers
        self._take(decisions)
        return took_s

    def agent(self, peer: str, data: bytes) -> float:
        """One message of an agent, and the answers to it. Returns processor seconds that the manager's side took."""
        begin = self.processor_s()
        decisions = self.manager.on_agent_frame(peer, decode_to_manager(data), self.now)
        self.write(decisions)
        answers = [(to, encode(frame)) for to, frame in decisions.frames]
        took_s = self.processor_s() - begin
        del answers
        self._take(decisions)
        return took_s

    def tick(self) -> float:
        self.now += 0.1
        begin = self.processor_s()
        decisions = self.manager.tick(self.now)
        self.write(decisions)
        answers = [encode(frame) for _, frame in decisions.frames]
        took_s = self.processor_s() - begin
        del answers
        self._take(decisions)
        return took_s

    def play(self, row_tokens: int, length: int) -> tuple[float, int]:
        """Every agent sends a frame. Returns the manager's processor seconds, and the tokens of the frames."""
        messages = [(a.peer, a.next_frame(row_tokens, length)) for a in self.agents.values() if a.drawn]
        before = self.manager.tracker.tokens_accepted
        took_s = sum(self.agent(peer, message) for peer, message in messages) + self.tick()
        return took_s, self.manager.tracker.tokens_accepted - before

    def _take(self, decisions: Decisions) -> None:
        if decisions.close:
            raise RuntimeError(f"the benchmark's agents misbehaved: {decisions.close[0]}")
        for peer, frame in decisions.frames:
            if isinstance(frame, StartFrame):
                drawn = self.agents[peer].drawn
                lengths = column(frame.prefix_lengths, "I")
                for lease, prefix in zip(column(frame.leases, "Q"), lengths, strict=True):
                    drawn[lease] = prefix
            elif isinstance(frame, LoadWeights):
                self.agent(peer, encode(ready(frame.version)))
            elif isinstance(frame, FinishedFrame):
                self.finished += len(frame.finishes)
