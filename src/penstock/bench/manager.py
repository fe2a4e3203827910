"""How much of a fleet one core can track: the rollout manager under simulated agents.

Measures the whole way from an agent's bytes to the manager's answers as bytes: decode, tracker, dispatch of
replacements, encode. The agents' own work (making frames) is left out. Time is the processor's, since the question is
what one core can do; the machine's other work does not count. The baseline is what a user would otherwise write: one
JSON message for each sequence's new tokens, appended to Python lists.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.common import Result, at_least, at_most, median
from penstock.rollout.manager import Decisions, Manager, ManagerConfig
from penstock.sample import Finish, Prompt
from penstock.wire import (
    AgentHello,
    FinishedFrame,
    FleetStatus,
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
    decode_from_manager,
    decode_to_manager,
    encode,
)

if TYPE_CHECKING:
    import aiohttp

DESCRIPTION = "rollout manager on one core: tokens tracked and samples finished per second, memory per token"

VOCABULARY = 32_000
PROMPT_TOKENS = 64
TOKENS_TARGET = 500_000
FINISHED_TARGET = 10_000
MEMORY_TARGET_BYTES = 16


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 5
    rounds = 6 if quick else 12
    results = []
    for agents, row_tokens, target in ((64, 8, True), (64, 4, True), (64, 1, False), (256, 8, False)):
        rates = [_tracking_rate(agents, row_tokens, rounds) for _ in range(repetitions)]
        what = f"tokens tracked, {agents} agents x 256 samples, {row_tokens} tokens a row"
        if target:
            results.append(at_least(what, median(rates), TOKENS_TARGET, "tokens/s"))
        else:
            results.append(Result(what, median(rates), "tokens/s"))
        if (agents, row_tokens) == (64, 8):
            ratios = [rate / _json_rate(row_tokens, rounds) for rate in rates]
            results.append(
                Result("the same against one JSON message a sequence", median(ratios), "x", note="same run, one core")
            )
    edge = [_edge_rate(8, 8 if quick else 40) for _ in range(1 if quick else 3)]
    note = "a process of its own; its user and system time, status frames included"
    results.append(
        at_least(
            "tokens tracked by `penstock manager` from 64 sockets, 8 tokens a row",
            median(edge),
            TOKENS_TARGET,
            "tokens/s",
            note,
        )
    )
    finished = [_finished_rate(64, 16, 6 if quick else 20) for _ in range(repetitions)]
    results.append(
        at_least(
            "samples finished, of 16 tokens each, replaced at once", median(finished), FINISHED_TARGET, "samples/s"
        )
    )
    tokens = 512 if quick else 2048
    results.append(
        at_most(
            f"memory per token tracked, 16,384 samples of {tokens} tokens",
            _memory_per_token(tokens),
            MEMORY_TARGET_BYTES,
            "bytes",
            note="growth of the resident set",
        )
    )
    batches = 12 if quick else 48
    results.append(
        at_most(
            f"growth over {batches} batches of 8,192 samples, after the first quarter",
            _growth_mib(batches),
            4.0,
            "MiB",
            note="resident set; an idle manager keeps what a batch needed",
        )
    )
    return results


# ---- simulated agents


@dataclass(slots=True)
class _Agent:
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


def _hello(name: str, max_running: int) -> AgentHello:
    return AgentHello(
        name=name, engine="bench", pid=1, host="bench", max_running=max_running, max_context_tokens=1 << 21
    )


def _ready(version: int) -> VersionReady:
    return VersionReady(version=version, vocab_size=VOCABULARY, max_context_tokens=1 << 21, load_s=0, bytes_fetched=0)


class World:
    """A manager with agents that are ready, on a clock that only the rounds move."""

    processor_s = staticmethod(time.process_time)

    def __init__(self, agents: int, max_running: int = 256) -> None:
        self.manager = self.make_manager()
        self.agents = {f"agent-{k}": _Agent(f"agent-{k}") for k in range(agents)}
        self.now = 0.0
        self.finished = 0
        self.frames: list[FrameFromManager] = []
        self._take(self.manager.on_trainer_connected(0.0))
        self.trainer(TrainerHello(name="bench", pid=1))
        for peer in self.agents:
            self._take(self.manager.on_agent_connected(peer, 0.0))
            self.agent(peer, encode(_hello(peer, max_running)))
        self.trainer(VersionPublished(version=1, source="bench:1"))

    def make_manager(self) -> Manager:
        return Manager(ManagerConfig(max_pending_per_instance=0))

    def write(self, decisions: Decisions) -> None:
        """What a journal would be given; here there is none."""

    def trainer(self, frame: TrainerHello | VersionPublished | SubmitBatch | ReleaseBatch) -> None:
        decisions = self.manager.on_trainer_frame(frame, self.now)
        self.write(decisions)
        self._take(decisions)

    def submit(self, name: str, prompts: int, samples_per_prompt: int, length: int) -> None:
        ids = array("i", range(PROMPT_TOKENS)).tobytes() * prompts
        self.trainer(
            SubmitBatch(
                batch=name,
                version=1,
                samples_per_prompt=samples_per_prompt,
                run_seed=0,
                sampling=Sampling(max_new_tokens=length),
                prompt_indices=column_bytes(range(prompts), "I"),
                prompt_ids=ids,
                prompt_lengths=column_bytes([PROMPT_TOKENS] * prompts, "I"),
                deadline_s=1e6,
            )
        )

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
                self.agent(peer, encode(_ready(frame.version)))
            elif isinstance(frame, FinishedFrame):
                self.finished += len(frame.finishes)


# ---- what is measured


def _tracking_rate(agents: int, row_tokens: int, rounds: int) -> float:
    """Tokens per processor second while every sample goes on."""
    world = World(agents)
    world.submit("bench", prompts=agents * 32, samples_per_prompt=8, length=1 << 20)
    total_s, total = 0.0, 0
    for _ in range(rounds):
        took_s, tokens = world.play(row_tokens, 1 << 20)
        if tokens != agents * 256 * row_tokens:
            raise RuntimeError(f"{tokens} tokens were tracked of {agents * 256 * row_tokens} sent")
        total_s += took_s
        total += tokens
    return total / total_s


def _finished_rate(agents: int, length: int, rounds: int) -> float:
    """Finished samples per processor second: tokens tracked, sample sent to the trainer, replacement dispatched.

    Samples start staggered, so that frames finish some rows and carry on others.
    """
    world = World(agents)
    samples = agents * 256 * (rounds + 2)
    world.submit("bench", prompts=samples // 8, samples_per_prompt=8, length=length)
    for number, agent in enumerate(world.agents.values()):
        _stagger(world, agent, number)
    before, seconds = world.finished, 0.0
    for _ in range(rounds):
        took_s, _ = world.play(4, length)
        seconds += took_s
    return (world.finished - before) / seconds


def _stagger(world: World, agent: _Agent, number: int) -> None:
    """Takes the sequences of one agent to different lengths, 0 to 12 tokens."""
    leases = list(agent.drawn)
    counts = [4 * ((k + number) % 4) for k in range(len(leases))]
    frame = TokenFrame(
        version=1,
        leases=column_bytes(leases, "Q"),
        starts=column_bytes([0] * len(leases), "I"),
        counts=column_bytes(counts, "I"),
        finishes=bytes(len(leases)),
        token_ids=bytes(4 * sum(counts)),
        logprobs=bytes(4 * sum(counts)),
    )
    world.agent(agent.peer, encode(frame))
    agent.drawn = dict(zip(leases, counts, strict=True))


def _memory_per_token(length: int) -> float:
    """Growth of the resident set while 64 x 256 samples get `length` tokens each, per token."""
    world = World(64)
    world.submit("bench", prompts=64 * 32, samples_per_prompt=8, length=length + 1)
    world.play(1, 1 << 20)
    gc.collect()
    before = _resident_bytes()
    tokens = 0
    while tokens < 64 * 256 * (length - 32):
        tokens += world.play(32, 1 << 20)[1]
    gc.collect()
    return (_resident_bytes() - before) / tokens


def _growth_mib(batches: int) -> float:
    """Growth of the resident set from the end of the first quarter of many batches in sequence to their end."""
    world = World(64, max_running=64)
    baseline = 0
    for number in range(batches):
        world.submit(f"train-{number}", prompts=1024, samples_per_prompt=8, length=32)
        while world.manager.tracker.batch(f"train-{number}") is not None:
            world.play(8, 32)
        world.trainer(ReleaseBatch(batch=f"train-{number}"))
        if number == batches // 4:
            gc.collect()
            baseline = _resident_bytes()
    gc.collect()
    return max(0, _resident_bytes() - baseline) / 2**20


# ---- over sockets

EDGE_START_S = 30.0
EDGE_WORK_S = 120.0


def _edge_rate(row_tokens: int, rounds: int) -> float:
    """Tokens per processor second of a real manager process with 64 agents on sockets of their own."""
    token = secrets.token_hex(16)
    with _manager_process(token) as (url, pid):
        return asyncio.run(_drive_edge(url, pid, token, row_tokens, rounds))


@contextmanager
def _manager_process(token: str) -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "manager", "--ready-file", str(ready), "--heartbeat-s", "100"],
            env={**os.environ, "PENSTOCK_TOKEN": token},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + EDGE_START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the manager process did not start")
                time.sleep(0.02)
            yield json.loads(ready.read_text())["url"], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Nobody:
    """Listens to a batch that never ends."""

    def on_samples(self, samples: Sequence[object]) -> None:
        raise RuntimeError("no sample ends in this benchmark")

    def on_done(self, done: object) -> None:
        raise RuntimeError("the batch can't be done in this benchmark")

    def on_failed(self, error: Exception) -> None:
        """The client is closed with the batch still open."""


async def _drive_edge(url: str, pid: int, token: str, row_tokens: int, rounds: int) -> float:
    import aiohttp

    from penstock.rollout.client import RolloutClient
    from penstock.wire.codec import PROTOCOL, PROTOCOL_HEADER

    accepted = 0

    def on_status(status: FleetStatus) -> None:
        nonlocal accepted
        accepted = status.tokens_accepted

    client = RolloutClient(url, token, lambda event: None, on_status)
    await client.connect()
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    async with aiohttp.ClientSession(headers=headers) as http:
        agents = [_Agent(f"agent-{k}") for k in range(64)]
        sockets = [await http.ws_connect(f"{url}/agent", max_msg_size=0) for _ in agents]
        for agent, socket in zip(agents, sockets, strict=True):
            await socket.send_bytes(encode(_hello(agent.peer, 256)))
        await client.publish(1, "bench:1")
        # More than all can take, pending ones too: those that are ready first must leave enough for the last.
        prompts = [Prompt(k, "", range(PROMPT_TOKENS), {}, "bench") for k in range(64 * 36)]
        await client.submit("bench", 1, prompts, 8, 0, Sampling(max_new_tokens=1 << 20), 1e6, _Nobody())
        async with asyncio.timeout(EDGE_WORK_S):
            await asyncio.gather(*(_until_full(a, s) for a, s in zip(agents, sockets, strict=True)))
            messages = [[agent.next_frame(row_tokens, 1 << 20) for _ in range(rounds)] for agent in agents]
            expected = sum(len(agent.drawn) for agent in agents) * row_tokens * rounds
            before_s = _cpu_s(pid)
            await asyncio.gather(*(_send_all(s, m) for s, m in zip(sockets, messages, strict=True)))
            while accepted < expected:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            took_s = _cpu_s(pid) - before_s
        await client.close()
    return expected / took_s


async def _until_full(agent: _Agent, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Loads what it is told to, and takes sequences until as many run as it has places for."""
    while len(agent.drawn) < 256:
        frame = decode_from_manager((await socket.receive()).data)
        if isinstance(frame, LoadWeights):
            await socket.send_bytes(encode(_ready(frame.version)))
        elif isinstance(frame, StartFrame):
            agent.drawn |= dict.fromkeys(column(frame.leases, "Q").tolist(), 0)


async def _send_all(socket: aiohttp.ClientWebSocketResponse, messages: list[bytes]) -> None:
    for message in messages:
        await socket.send_bytes(message)


def _cpu_s(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- the usual way


def _json_rate(row_tokens: int, rounds: int) -> float:
    """Tokens per processor second of the usual way: a JSON message for each sequence, tokens in Python lists."""
    held: dict[str, tuple[list[int], list[float]]] = {f"sample-{k}": ([], []) for k in range(256)}
    seconds, tokens = 0.0, 0
    for _ in range(rounds * 16):
        messages = list(_json_messages(held, row_tokens))
        begin = time.process_time()
        for message in messages:
            fields = json.loads(message)
            ids, values = held[fields["id"]]
            if fields["start"] != len(ids):
                raise RuntimeError("the baseline lost a token")
            ids.extend(fields["token_ids"])
            values.extend(fields["logprobs"])
        seconds += time.process_time() - begin
        tokens += 256 * row_tokens
    return tokens / seconds


def _json_messages(held: dict[str, tuple[list[int], list[float]]], row_tokens: int) -> Iterator[str]:
    for name, (ids, _) in held.items():
        yield json.dumps(
            {
                "id": name,
                "start": len(ids),
                "token_ids": [(7 * k) % VOCABULARY for k in range(row_tokens)],
                "logprobs": [-0.0123456789 * (k + 1) for k in range(row_tokens)],
                "finish_reason": None,
            }
        )


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
