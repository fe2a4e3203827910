"""A whole small house for benchmarks and tests: real manager and engine processes, weights over TCP, a client.

Decides nothing and measures nothing; it is what `migration` and the kill test stand on.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, RolloutError
from penstock.observe.events import Event
from penstock.rollout.client import FinishedSample, RolloutClient
from penstock.sample import Prompt
from penstock.train.processes import LocalProcesses
from penstock.train.shards import safetensors_dtype, tensor_bytes
from penstock.weights import WeightStore
from penstock.wire import BatchDone, FleetStatus, Sampling

VOCAB = 97
RUN_SEED = 7


def small_llama() -> Any:
    """A random Llama in float32, made by transformers; its weights are scaled so that answers are varied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def config_for(
    folder: Path,
    engines: int,
    manager: Mapping[str, Any] | None = None,
    rollout: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> RunConfig:
    options = {"count": engines, "max_running": 48, "max_context_tokens": 256, "frame_steps": 4, **engine_options}
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "manager": dict(manager or {"journal": "off"}),
            "data": {"train": [{"kind": "jsonl", "path": "unused.jsonl"}], "max_prompt_tokens": 16},
            "rollout": {
                "engines": options,
                "heartbeat_s": 1.0,
                "sampling": {"max_new_tokens": 128},
                **(rollout or {}),
            },
        }
    )


@dataclass
class Collected:
    """Listens to one batch."""

    samples: list[FinishedSample] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error: RolloutError | None = None

    def on_samples(self, samples: list[FinishedSample]) -> None:
        self.samples.extend(samples)

    def on_done(self, done: BatchDone) -> None:
        self.ended.set()

    def on_failed(self, error: RolloutError) -> None:
        self.error = error
        self.ended.set()

    def by_identity(self) -> dict[tuple[int, int], FinishedSample]:
        found = {(sample.prompt, sample.replica): sample for sample in self.samples}
        if len(found) != len(self.samples):
            raise RolloutError(f"{len(self.samples) - len(found)} samples came twice")
        return found


@dataclass
class House:
    """One manager, its engines, a weight store and the trainer's client."""

    processes: LocalProcesses
    store: WeightStore
    source: str
    url: str
    client: RolloutClient
    token: str
    """Opens every door."""
    events: list[Event] = field(default_factory=list)
    status: list[FleetStatus] = field(default_factory=list)

    async def publish(self, version: int, model: Any) -> None:
        tensors = [
            (name, safetensors_dtype(tensor.dtype), tuple(tensor.shape), tensor_bytes(tensor))
            for name, tensor in model.state_dict().items()
        ]
        manifest = self.store.publish(version, tensors, model.config.to_json_string())
        await self.client.publish(version, self.source, manifest.digest)

    async def submit(
        self, batch: str, prompts: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling, version: int = 0
    ) -> Collected:
        collected = Collected()
        await self.client.submit(batch, version, prompts, samples_per_prompt, RUN_SEED, sampling, 60.0, collected)
        return collected

    async def finish(self, batch: str, collected: Collected, timeout_s: float = 90.0) -> dict[Any, FinishedSample]:
        async with asyncio.timeout(timeout_s):
            await collected.ended.wait()
        if collected.error is not None:
            raise collected.error
        await self.client.release(batch)
        return collected.by_identity()

    async def until_connected(self, timeout_s: float = 60.0) -> None:
        """Connects the client to a manager that may still be starting."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                await self.client.connect()
                return
            except RolloutError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {timeout_s:g} s for {what}")
            await asyncio.sleep(0.005)

    def events_of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@contextlib.asynccontextmanager
async def open_house(
    folder: Path,
    engines: int,
    manager: Mapping[str, Any] | None = None,
    reconnect_s: float = 0.0,
    rollout: Mapping[str, Any] | None = None,
    **engine_options: Any,
) -> AsyncIterator[House]:
    """`manager`, `rollout`: keys of those sections of the configuration; without the first it keeps no journal."""
    config = config_for(folder, engines, manager, rollout, **engine_options)
    seen: list[Event] = []
    status: list[FleetStatus] = []
    token = secrets.token_urlsafe(16)
    processes = LocalProcesses(config, folder, token, seen.append)
    store = WeightStore("house", "127.0.0.1", 0, token)
    try:
        url = await asyncio.to_thread(processes.start_manager)
        client = RolloutClient(url, token, seen.append, status.append, reconnect_s=reconnect_s)
        await client.connect()
        house = House(processes, store, store.start(), url, client, token, seen, status)
        try:
            for _ in range(engines):
                processes.start_engine(url, "the house opens")
            yield house
        finally:
            await house.client.close()
    finally:
        store.close()
        await asyncio.to_thread(processes.close)


def prompts(count: int, length: int = 6) -> list[Prompt]:
    """`count` different prompts of `length` to `length` + 3 tokens."""
    made = []
    for index in range(count):
        ids = [(index * 31 + position * 17 + index * index) % VOCAB for position in range(length + index % 4)]
        made.append(Prompt(index=index, text="", token_ids=ids, row={}, source=f"made[{index}]"))
    return made
