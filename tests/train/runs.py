"""Runs of the training loop on small models and fake ports, which several tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollout, FakeScorer, FakeStore, StepPrompts

from penstock.config.run import RunConfig
from penstock.environments import Environment, EnvironmentHost
from penstock.sample import Prompt, Sample
from penstock.train.actor import Actor
from penstock.train.advantages import get_advantage
from penstock.train.checkpoint import Checkpoints
from penstock.train.critic import Critic
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer, TrainerPorts


@dataclass
class Run:
    trainer: Trainer
    rollout: FakeRollout
    scorer: FakeScorer
    store: FakeStore
    events: list[Any] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    recorded: list[tuple[int, list[Sample]]] = field(default_factory=list)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(model_folder: Path, tmp_path: Path) -> Iterator[MakeRun]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompts = [
        Prompt(k, word, tokenizer.encode(f"Say: {word}"), {"answer": word}, f"words:{k}")
        for k, word in enumerate(["sun", "moon", "a", "horse", "zebra", "x-ray", "tree", "house"])
    ]
    hosts: list[EnvironmentHost] = []
    with EdgeLoop() as edge:

        def make(
            rollout: FakeRollout | None = None,
            scorer: FakeScorer | None = None,
            checkpoints: Any = None,
            watch: Callable[[], None] = lambda: None,
            held: Callable[[], AbstractContextManager[object]] = nullcontext,
            unscored: str = "drop_group",
            deadline_s: float = 30.0,
            start_step: int = 0,
            actor: Actor | None = None,
            evaluate: bool = True,
            sampling: Mapping[str, Any] | None = None,
            observe: Mapping[str, Any] | None = None,
            window: str | float = "off",
            environment: Environment | None = None,
            talk: Mapping[str, Any] | None = None,
            **train: Any,
        ) -> Run:
            config = RunConfig.model_validate(
                {
                    "model": {"path": str(model_folder)},
                    "data": {"train": [{"kind": "jsonl", "path": "words"}], "max_prompt_tokens": 16},
                    "rollout": {
                        "prompts_per_step": 4,
                        "samples_per_prompt": 4,
                        "deadline_s": deadline_s,
                        "window": window,
                        "sampling": {"max_new_tokens": 8, "stop_token_ids": [9], **(sampling or {})},
                    },
                    "manager": {"reconnect_s": 0},
                    "reward": {"unscored": unscored, "timeout_s": 0.1},
                    "environment": {"timeout_s": 10.0, **(talk or {})},
                    "observe": observe or {},
                    "train": {
                        "steps": 2,
                        "lr": 1e-3,
                        "device": "cpu",
                        "tokens_per_micro_batch": 64,
                        "min_samples_per_micro_batch": 4,
                        **train,
                    },
                }
            )
            total = config.train.steps * config.train.mini_batches_per_step * config.train.epochs
            made = actor or Actor(model_folder, config.train, total_optimizer_steps=total, horizon_tokens=8)
            critic = None
            if get_advantage(config.train.advantage).has_critic:
                critic = Critic(
                    model_folder, config.train, total_optimizer_steps=total, horizon_tokens=8, dtype="float32"
                )
            run = Run(None, rollout or FakeRollout(), scorer or FakeScorer(), FakeStore())  # type: ignore[arg-type]
            host = None
            if environment is not None:
                host = EnvironmentHost(environment, vocab_size=64, timeout_s=config.environment.timeout_s)
                hosts.append(host)
            ports = TrainerPorts(
                rollout=run.rollout,
                scorer=run.scorer,
                weights=run.store,
                weights_source="store:1",
                decoder=tokenizer,
                prompts=StepPrompts(prompts),
                eval_prompts=prompts if evaluate else [],
                stop_ids=(2,),
                edge=edge,
                emit=run.events.append,
                record=lambda step, metrics: run.metrics.__setitem__(step, dict(metrics)),
                record_samples=lambda step, samples: run.recorded.append((step, list(samples))),
                checkpoints=checkpoints or Checkpoints(tmp_path / "checkpoints", 2),
                watch=watch,
                held=held,
                environment=host,
            )
            run.trainer = Trainer(config, Learner(config, made, critic), ports, start_step=start_step)
            return run

        yield make
    for host in hosts:
        host.close()


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.trainer.learner.actor.named_weights()}


def apart(one: Run, other: Run) -> float:
    """Largest difference between two runs' weights."""
    return max(float((tensor - weights(other)[name]).abs().max()) for name, tensor in weights(one).items())
