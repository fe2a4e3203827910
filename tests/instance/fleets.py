"""A real manager, a trainer's client and real agents in one process, over real sockets; what tests of them share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from penstock.bench.chaos_links import Link
from penstock.instance import Agent, PacedEngine, SequenceStart
from penstock.instance.paced import paced_tokens
from penstock.observe.events import Event, InstanceChanged
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.sample import Finish, Prompt, SampleId, sample_seed
from penstock.wire import BatchDone, FleetStatus, Sampling

E = TypeVar("E")
TOKEN = "the-run's-token"
VOCAB = 50
RUN_SEED = 11
FRAME_STEPS = 4
PROMPTS = [Prompt(index=i, text="", token_ids=[i + 1, 2, 3], row={}, source="test") for i in range(8)]
WITHIN_S = 60.0
PATIENT_HEARTBEAT_S = 10.0
"""Where no test is about silence, no machine that is merely busy may be taken for dead."""


async def until(condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


class Batch:
    """A listener that gathers one batch and fails on what comes twice."""

    def __init__(self, name: str, prompts: Sequence[Prompt], replicas: int, sampling: Sampling) -> None:
        self.name = name
        self.asked = {(prompt.index, replica) for prompt in prompts for replica in range(replicas)}
        self.sampling = sampling
        self.samples: dict[tuple[int, int], FinishedSample] = {}
        self.done: asyncio.Future[BatchDone] = asyncio.get_running_loop().create_future()

    def on_samples(self, samples: list[FinishedSample]) -> None:
        for sample in samples:
            assert (sample.prompt, sample.replica) not in self.samples
            self.samples[sample.prompt, sample.replica] = sample

    def on_done(self, done: BatchDone) -> None:
        self.done.set_result(done)

    def on_failed(self, error: Exception) -> None:
        self.done.set_exception(error)

    async def finished(self) -> BatchDone:
        return await asyncio.wait_for(self.done, WITHIN_S)

    async def whole(self) -> BatchDone:
        """Once it is finished: every sample came, and says what it says when nothing ever happens to it."""
        done = await self.finished()
        assert (done.samples, done.failed) == (len(self.asked), 0)
        assert set(self.samples) == self.asked
        for (prompt, replica), sample in self.samples.items():
            assert (sample.token_ids.tolist(), sample.finish) == self._undisturbed(prompt, replica)
        return done

    def _undisturbed(self, prompt: int, replica: int) -> tuple[list[int], Finish]:
        seed = sample_seed(RUN_SEED, SampleId(self.name, prompt, replica))
        start = SequenceStart(lease=0, seed=seed, prompt_ids=[1], prefix_ids=[], sampling=self.sampling)
        tokens, finish = paced_tokens(start, 0, self.sampling.max_new_tokens, VOCAB, 0.0)
        return tokens, finish or Finish.LENGTH


class Fleet:
    """A manager of its own, or that at `url`; its trainer's client; agents that dial it, some over relays."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        url: str = "",
        heartbeat_s: float = PATIENT_HEARTBEAT_S,
        max_context_tokens: int = 0,
    ) -> None:
        fleet = FleetConfig(heartbeat_s=heartbeat_s)
        manager = ManagerConfig(fleet=fleet, frame_steps=FRAME_STEPS, max_context_tokens=max_context_tokens)
        self.server = None if url else ManagerServer(ServerConfig(token=TOKEN, manager=manager))
        self.url = url
        self.sampling = sampling
        self.events: list[Event] = []
        self.status: FleetStatus | None = None
        self.agents: dict[str, tuple[Agent, asyncio.Task[None]]] = {}
        self.links: dict[str, Link] = {}
        self.client: RolloutClient

    async def __aenter__(self) -> Fleet:
        if self.server is not None:
            await self.server.start()
            self.url = self.server.url
        self.client = RolloutClient(self.url, TOKEN, self.events.append, self._on_status)
        await self.client.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()
        for link in self.links.values():
            link.heal()
        for agent, _ in self.agents.values():
            agent.drain("the test ended")
        tasks = [task for _, task in self.agents.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=20)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self.links.values():
            await link.close()
        if self.server is not None:
            await self.server.close()

    def _on_status(self, status: FleetStatus) -> None:
        self.status = status

    def join(
        self,
        name: str,
        tokens_per_s: float = 8000.0,
        context_tokens: int = 0,
        engine: PacedEngine | None = None,
        url: str = "",
    ) -> Agent:
        engine = engine or PacedEngine(tokens_per_s=tokens_per_s, max_running=8, max_context_tokens=context_tokens)
        agent = Agent(engine, url or self.url, TOKEN, name)
        self.agents[name] = agent, asyncio.create_task(agent.run())
        return agent

    async def join_over_a_link(self, name: str, engine: PacedEngine) -> Link:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        link = self.links[name] = Link(lambda: (host, int(port)))
        await link.open()
        self.join(name, engine=engine, url=f"http://127.0.0.1:{link.port}")
        return link

    async def submit(
        self, name: str = "s0", version: int = 0, replicas: int = 2, prompts: Sequence[Prompt] = PROMPTS
    ) -> Batch:
        batch = Batch(name, prompts, replicas, self.sampling)
        await self.client.submit(name, version, prompts, replicas, RUN_SEED, self.sampling, WITHIN_S, batch)
        return batch

    def ends(self, name: str = "") -> list[InstanceChanged]:
        """Of the machine with this name, or of all."""
        gone = [event for event in self.events if isinstance(event, InstanceChanged) and event.after == "gone"]
        return [event for event in gone if name in ("", event.name)]

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def tokens_of(self, name: str) -> int:
        rows = self.status.instances if self.status else ()
        return sum(row.tokens_accepted for row in rows if row.name == name)
