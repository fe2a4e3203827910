"""One real run with paced machines: trainer, manager, agents and sockets as in any, tokens and passes at set speeds.

Machines come and go by a script, in seconds from the first step. The trainer's passes are real and last at least as
long as its pace says, as a larger model's would; so a busy computer does not decide what is measured. Measures step
times and writes the event log; knows nothing of predictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.bench.common import random_llama
from penstock.bench.rig import CALL_S, PROMPT_TOKENS, MadePrompts, joined_rig, rig_config
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded
from penstock.instance.agent import Agent
from penstock.instance.paced import PacedEngine
from penstock.observe import events
from penstock.observe.log import EventLog
from penstock.rollout.fleet import FleetConfig
from penstock.rollout.manager import ManagerConfig
from penstock.rollout.server import ManagerServer, ServerConfig
from penstock.train.actor import Actor
from penstock.train.batching import PassBatch
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer

STOP_ID = 7
HEARTBEAT_S = 0.1
MAX_PENDING = 8
FRAME_STEPS = 2
MICRO_BATCH_SAMPLES = 32


@dataclass(frozen=True, slots=True)
class Kind:
    """A machine: seconds of a decode step, of each sequence in it, of each token of context, of a prefilled token."""

    base_s: float
    sequence_s: float
    context_s: float = 0.0
    prefill_s: float = 0.0
    max_running: int = 64


KINDS = {
    "even": Kind(0.004, 1.5e-4, 1e-7, 1e-5),
    "slow": Kind(0.008, 3e-4, 2e-7, 2e-5),
    "narrow": Kind(0.004, 1.5e-4, 1e-7, 1e-5, max_running=16),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """`machines`: names whose part before ":" is their kind. `script`: (seconds, name, comes) after the start."""

    name: str
    machines: tuple[str, ...]
    mean_tokens: int = 100
    max_new_tokens: int = 240
    script: tuple[tuple[float, str, bool], ...] = ()
    prompts: int = 24
    samples_per_prompt: int = 8
    training_s_per_token: float = 4e-5
    ahead_share: float = 0.0
    """Of training, the reference's pass: made while no group is whole."""


@dataclass
class Measured:
    steps_s: list[float] = field(default_factory=list)
    log: Path = Path()

    @property
    def step_s(self) -> float:
        return sum(self.steps_s) / len(self.steps_s)


class RooflineEngine(PacedEngine):
    """Its decode steps last as its kind's roofline says."""

    def __init__(self, kind: Kind, mean_tokens: int) -> None:
        super().__init__(
            tokens_per_s=1.0,
            max_running=kind.max_running,
            max_context_tokens=4096,
            frame_steps=FRAME_STEPS,
            mean_tokens=mean_tokens,
        )
        self.kind = kind

    def _duration(self, prefilled: int, tokens: int, steps: int) -> float:
        kind, context = self.kind, self.load().kv_tokens
        step_s = kind.base_s + context * kind.context_s
        return prefilled * kind.prefill_s + steps * step_s + tokens * kind.sequence_s


class PacedActor(Actor):
    """Real passes that last at least `s_per_token` for each token of prompt and answer."""

    s_per_token = 0.0
    ahead_share = 0.0
    """Of that, the reference's pass."""

    def accumulate(self, batch: PassBatch) -> None:
        began = time.perf_counter()
        super().accumulate(batch)
        looked_at = batch.reference_logprobs_BT is not None
        self._pace(batch, 1 - self.ahead_share * looked_at, began)

    def reference_logprobs(self, batch: PassBatch) -> Tensor:
        began = time.perf_counter()
        found = super().reference_logprobs(batch)
        self._pace(batch, self.ahead_share, began)
        return found

    def _pace(self, batch: PassBatch, share: float, began: float) -> None:
        tokens = int(batch.mask_BT.sum()) + PROMPT_TOKENS * len(batch.mask_BT)
        left_s = share * tokens * self.s_per_token - (time.perf_counter() - began)
        if left_s > 0:
            time.sleep(left_s)


class _Machines:
    """Agents on a loop of their own, by name."""

    def __init__(self, url: str, token: str, setting: Setting, edge: EdgeLoop) -> None:
        self._url, self._token, self._setting, self._edge = url, token, setting, edge
        self._tasks: dict[str, tuple[asyncio.Task[None], RooflineEngine]] = {}
        self._script: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._edge.run(self._add(self._setting.machines), "starting the machines", CALL_S)

    def begin_script(self) -> None:
        self._edge.run(self._begin_script(), "starting the script", CALL_S)

    def close(self) -> None:
        self._edge.run(self._close(), "ending the machines", CALL_S)

    async def _begin_script(self) -> None:
        self._script = asyncio.create_task(self._follow(), name="fidelity-script")

    async def _follow(self) -> None:
        began = time.monotonic()
        for at_s, name, comes in self._setting.script:
            await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
            if comes:
                await self._add([name])
            else:
                await self._end(name)

    async def _add(self, names: Sequence[str]) -> None:
        for name in names:
            engine = RooflineEngine(KINDS[name.partition(":")[0]], self._setting.mean_tokens)
            agent = Agent(engine, self._url, self._token, name)
            self._tasks[name] = asyncio.create_task(agent.run(), name=name), engine

    async def _end(self, name: str) -> None:
        """As SIGKILL would: no goodbye."""
        task, engine = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait([task])
        await engine.close()

    async def _close(self) -> None:
        if self._script is not None:
            self._script.cancel()
            await asyncio.wait([self._script])
        for name in list(self._tasks):
            await self._end(name)


def run_setting(setting: Setting, steps: int, model: Path, folder: Path) -> Measured:
    """Some steps of a run. Raises DeadlineExceeded where the machines do not get ready."""
    with _rig(setting, model, folder) as rig:
        rig.trainer.publish()
        rig.machines.open()
        rig.wait_for(len(setting.machines))
        rig.machines.begin_script()
        measured = Measured(log=folder / "events.jsonl")
        for _ in range(steps):
            began = time.perf_counter()
            rig.trainer.train_step()
            measured.steps_s.append(time.perf_counter() - began)
    return measured


@dataclass(frozen=True, slots=True)
class _Rig:
    trainer: Trainer
    machines: _Machines
    server: ManagerServer

    def wait_for(self, count: int) -> None:
        """Until so many machines hold the first version, so that starting them is in nobody's step."""
        deadline = time.monotonic() + CALL_S
        while sum(instance.version == 0 for instance in self.server.manager.fleet) < count:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{count} machines were not ready in {CALL_S:g} s")
            time.sleep(0.02)


@contextlib.contextmanager
def _rig(setting: Setting, model: Path, folder: Path) -> Iterator[_Rig]:
    config = _config(setting, model)
    token = secrets.token_urlsafe(16)
    actor = PacedActor(model, config.train, total_optimizer_steps=1000, horizon_tokens=setting.max_new_tokens)
    actor.s_per_token, actor.ahead_share = setting.training_s_per_token, setting.ahead_share
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as parts:
        log = parts.enter_context(EventLog(folder / "events.jsonl"))
        started = events.RunStarted(ts=time.time(), run="fidelity", version="", config=config.model_dump(mode="json"))
        log.emit(started)
        far = parts.enter_context(EdgeLoop("fidelity-machines"))
        server = far.run(_open_server(config, token), "starting the manager", CALL_S)
        parts.callback(lambda: far.run(server.close(), "ending the manager", CALL_S))
        rig = parts.enter_context(
            joined_rig(folder, server.url, token, MadePrompts(setting.prompts, vary=True), (STOP_ID,), log.emit)
        )
        machines = parts.enter_context(contextlib.closing(_Machines(server.url, token, setting, far)))
        yield _Rig(Trainer(config, Learner(config, actor), rig.ports), machines, server)


async def _open_server(config: RunConfig, token: str) -> ManagerServer:
    fleet = FleetConfig(heartbeat_s=HEARTBEAT_S, heartbeats_missed=round(CALL_S / HEARTBEAT_S))
    manager = ManagerConfig(fleet=fleet, frame_steps=FRAME_STEPS, max_pending_per_instance=MAX_PENDING)
    server = ManagerServer(ServerConfig(token=token, manager=manager))
    await server.start()
    return server


def _config(setting: Setting, model: Path) -> RunConfig:
    rollout = {
        "prompts_per_step": setting.prompts,
        "samples_per_prompt": setting.samples_per_prompt,
        "heartbeat_s": HEARTBEAT_S,
        "max_pending_per_instance": MAX_PENDING,
        "sampling": {"max_new_tokens": setting.max_new_tokens},
    }
    train = {"tokens_per_micro_batch": 1 << 20, "min_samples_per_micro_batch": MICRO_BATCH_SAMPLES}
    return rig_config(model, rollout, {**train, "kl_coef": 0.01 if setting.ahead_share else 0.0})


def small_llama() -> Any:
    """So small that its passes are shorter than their pace on any computer."""
    return random_llama(
        0,
        vocab_size=101,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=4096,
    )
