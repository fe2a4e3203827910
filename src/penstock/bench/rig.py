"""The trainer's side of a benchmark that runs the real loop: store, edge, scorer and client, joined to a manager.

Prompts are made, rewards random, tokens come from paced engines. Measures nothing, and makes no trainer: whose
passes last how long is each benchmark's own.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded
from penstock.reward.scorer import Scorer
from penstock.rollout.client import RolloutClient
from penstock.sample import Prompt
from penstock.train.checkpoint import Checkpoints
from penstock.train.edge import EdgeLoop
from penstock.train.loop import Trainer, TrainerPorts
from penstock.train.ports import Emit
from penstock.train.processes import LocalProcesses
from penstock.weights import WeightStore
from penstock.wire import FleetStatus

PROMPT_TOKENS = 16
CALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Rig:
    ports: TrainerPorts
    url: str
    """The manager's."""
    token: str
    """Opens every door."""
    status: list[FleetStatus]

    def until_ready(self, count: int, version: int | None = None) -> None:
        """Waits until so many instances hold `version`, or any, so that loading it is in nobody's step.

        Raises DeadlineExceeded.
        """
        deadline = time.monotonic() + CALL_S
        while self._ready(version) < count:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{count} instances were not ready with version {version} in {CALL_S:g} s")
            time.sleep(0.02)

    def _ready(self, version: int | None) -> int:
        rows = self.status[-1].instances if self.status else ()
        return sum(row.state == "ready" and version in (None, row.version) for row in rows)


@contextlib.contextmanager
def local_rig(
    config: RunConfig,
    folder: Path,
    prompts: MadePrompts,
    engines: int,
    stop_ids: tuple[int, ...] = (),
    emit: Emit = lambda event: None,
) -> Iterator[Rig]:
    """With a manager and `engines` engines in processes of their own."""
    token = secrets.token_urlsafe(16)
    with contextlib.closing(LocalProcesses(config, folder, token, emit)) as processes:
        url = processes.start_manager()
        for _ in range(engines):
            processes.start_engine(url, "the benchmark starts")
        with joined_rig(folder, url, token, prompts, stop_ids, emit, processes.check_manager) as rig:
            yield rig


@contextlib.contextmanager
def joined_rig(
    folder: Path,
    url: str,
    token: str,
    prompts: MadePrompts,
    stop_ids: tuple[int, ...],
    emit: Emit,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[Rig]:
    """With a manager that listens at `url`."""
    status: list[FleetStatus] = []
    with contextlib.ExitStack() as parts:
        store = parts.enter_context(contextlib.closing(WeightStore("benchmark", "127.0.0.1", 0, token)))
        source = store.start()
        edge = parts.enter_context(EdgeLoop())
        scorer = open_scorer(edge, parts, Scorer("penstock.reward.verifiers:random_reward"))
        client = RolloutClient(url, token, emit, status.append)
        edge.run(client.connect(), "connecting to the manager", CALL_S)
        parts.callback(lambda: edge.run(client.close(), "closing the manager's socket", CALL_S))
        ports = TrainerPorts(
            rollout=client,
            scorer=scorer,
            weights=store,
            weights_source=source,
            decoder=_Decoder(),
            prompts=prompts,
            eval_prompts=(),
            stop_ids=stop_ids,
            edge=edge,
            emit=emit,
            record=lambda step, metrics: None,
            checkpoints=Checkpoints(folder / "checkpoints", 1),
            watch=watch,
        )
        yield Rig(ports, url, token, status)


def open_scorer(edge: EdgeLoop, parts: contextlib.ExitStack, scorer: Scorer, timeout_s: float = CALL_S) -> Scorer:
    """Starts it on the edge loop; `parts` closes it."""
    edge.run(scorer.start(), "loading the reward function", timeout_s)
    parts.callback(lambda: edge.run(scorer.close(), "closing the scorer", timeout_s))
    return scorer


def timed_step(trainer: Trainer) -> dict[str, float]:
    """One step's metrics, its own seconds as `step_s`.

    The trainer counts from its last step on; where several take turns, the others' steps would be in it.
    """
    began = time.perf_counter()
    metrics = trainer.train_step()
    return {**metrics, "step_s": time.perf_counter() - began}


@dataclass(frozen=True, slots=True)
class MadePrompts:
    """`count` prompts of `PROMPT_TOKENS` tokens below 100; with `vary`, others in each step."""

    count: int
    vary: bool = False

    def for_step(self, step: int) -> list[Prompt]:
        shift = step if self.vary else 0
        return [
            Prompt(k, "", [(k * 7 + position + shift) % 100 for position in range(PROMPT_TOKENS)], {}, f"made[{k}]")
            for k in range(self.count)
        ]


class _Decoder:
    """Paced tokens say nothing; their text is their number."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(len(token_ids))


def rig_config(model: Path, rollout: Mapping[str, Any], train: Mapping[str, Any], **sections: Any) -> RunConfig:
    """Of a trainer on one thread that learns from every group. `rollout`, `train`: what these sections have besides."""
    alone = {
        "device": "cpu",
        "threads": 1,
        "lr": 1e-6,
        "old_logprobs": "recompute",
        "skip_groups_without_signal": False,
    }
    data = {"train": [{"kind": "jsonl", "path": "unused"}], "max_prompt_tokens": PROMPT_TOKENS}
    return RunConfig.model_validate(
        {"model": {"path": str(model)}, "data": data, "rollout": rollout, "train": {**alone, **train}, **sections}
    )


def one_by_one(
    model: Path, prompts: int, per_prompt: int, output_tokens: int, micro_batch: int, tokens_per_s: float, **train: Any
) -> RunConfig:
    """A run of few samples at once, so that they finish one after another, as with answers of many lengths.

    `micro_batch`: samples; `tokens_per_s`: of each engine.
    """
    rollout = {
        "prompts_per_step": prompts,
        "samples_per_prompt": per_prompt,
        "heartbeat_s": 2.0,
        "max_pending_per_instance": 8,
        "sampling": {"max_new_tokens": output_tokens},
        "engines": {"tokens_per_s": tokens_per_s, "max_running": 4, "frame_steps": 4},
    }
    passes = {
        "tokens_per_micro_batch": micro_batch * (PROMPT_TOKENS + output_tokens),
        "min_samples_per_micro_batch": micro_batch,
    }
    return rig_config(model, rollout, passes | train)
