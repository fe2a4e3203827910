"""A run of 4 steps, and one of 2 steps that is resumed for 2: the real loop and actor, with rollouts that follow from
the sample's identity and the published weights alone, are the same run bit for bit."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollout, FakeScorer, FakeStore

from penstock.config.run import RunConfig
from penstock.data import PromptOrder
from penstock.observe import events
from penstock.rollout.client import FinishedSample
from penstock.sample import Prompt, SampleId
from penstock.train.actor import Actor
from penstock.train.checkpoint import Checkpoints, find_checkpoint, load_checkpoint
from penstock.train.critic import Critic
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer, TrainerPorts

# Everything that reads a clock or counts from the process's start.
TIMES = {"train_s", "publish_stall_s", "rollout_s", "rollout_tokens_per_s", "trainer_wait_s", "step_s"}
TIMES |= {"train_tokens_per_s", "mfu", "reward_s_mean"}
PPO = {
    "advantage": "gae",
    "critic": {"lr": 1e-3, "warmup_steps": 2},
    "epochs": 2,
    "kl_in": "reward",
    "kl_target": 0.02,
    "kl_horizon_samples": 32,
    "gae_lambda": 0.9,
}

CONFIG = {
    "seed": 5,
    "data": {"train": [{"kind": "jsonl", "path": "words"}], "max_prompt_tokens": 16},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "sampling": {"max_new_tokens": 8, "temperature": 0.8}},
    "observe": {"samples_every": 1},
    "train": {
        "steps": 4,
        "lr": 1e-3,
        "lr_schedule": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "kl_coef": 0.05,
        "mini_batches_per_step": 2,
        "device": "cpu",
        "tokens_per_micro_batch": 64,
        "streaming": False,
        "eval_every": 1,
        "checkpoint_every": 2,
    },
}


class Words:
    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._order = PromptOrder(len(prompts), 4, seed)

    def for_step(self, step: int) -> list[Prompt]:
        return [self._prompts[index] for index in self._order.for_step(step)]


class Run:
    """One process's part of a run, in `folder`, from its latest checkpoint where `resume`."""

    def __init__(self, model: Path, folder: Path, edge: EdgeLoop, *, resume: bool = False, **train: Any) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        words = ["sun", "moon", "a", "horse", "zebra", "x-ray", "tree", "house", "cup", "snow", "key"]
        prompts = [
            Prompt(k, word, tokenizer.encode(f"Say: {word}"), {"answer": word}, f"words:{k}")
            for k, word in enumerate(words)
        ]
        config = RunConfig.model_validate(
            {**CONFIG, "model": {"path": str(model)}, "train": {**CONFIG["train"], **train}}  # type: ignore[dict-item]
        )
        self.store, self.rollout = FakeStore(), FakeRollout(alter=self._speak)
        self.events: list[Any] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.samples: dict[SampleId, tuple[int, str, Any]] = {}
        shared: dict[str, Any] = {"total_optimizer_steps": 8 * config.train.epochs, "horizon_tokens": 8}
        self.actor = Actor(model, config.train, **shared)
        self.critic = None
        if config.train.advantage == "gae":
            self.critic = Critic(model, config.train, dtype="float32", **shared)
        start = load_checkpoint(find_checkpoint(folder), self.actor, self.critic).step if resume else 0
        ports = TrainerPorts(
            rollout=self.rollout,
            scorer=FakeScorer(),
            weights=self.store,
            weights_source="store:1",
            decoder=tokenizer,
            prompts=Words(prompts, config.seed),
            eval_prompts=prompts[:3],
            stop_ids=(2,),
            edge=edge,
            emit=self.events.append,
            record=lambda step, metrics: self.metrics.__setitem__(step, dict(metrics)),
            record_samples=lambda step, samples: self.samples.update(
                {sample.id: (step, sample.response, sample.score) for sample in samples}
            ),
            checkpoints=Checkpoints(folder, 3),
        )
        Trainer(config, Learner(config, self.actor, self.critic), ports, start_step=start).run()

    def _speak(self, batch: str, sample: FinishedSample) -> FinishedSample:
        """What an engine with these weights says: other weights, other tokens."""
        version = self.rollout.batches[batch][0]
        weights = hashlib.sha256(b"".join(self.store.versions[version].values())).hexdigest()
        chance = random.Random(f"{weights} {batch}/{sample.prompt}.{sample.replica}")
        token_ids = array("i", [chance.randrange(5, 60) for _ in sample.token_ids])
        logprobs = array("f", [-4.0 - chance.random() for _ in token_ids])
        return FinishedSample(
            sample.prompt, sample.replica, token_ids, logprobs, sample.version_spans, sample.finish, sample.cause
        )

    def told(self) -> dict[int, dict[str, float]]:
        return {
            step: {name: value for name, value in metrics.items() if name not in TIMES and not name.startswith("time/")}
            for step, metrics in self.metrics.items()
        }

    def asked(self) -> dict[str, list[int]]:
        return {batch: prompts for batch, (_, _, prompts) in self.rollout.batches.items()}

    def accuracies(self) -> dict[int, float]:
        return {event.step: event.accuracy for event in self.events if isinstance(event, events.Evaluated)}


@pytest.mark.parametrize("options", [{"old_logprobs": "auto"}, {"old_logprobs": "recompute"}, PPO])
def test_a_resumed_run_is_the_run_that_was_never_interrupted(
    model_folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    with EdgeLoop() as edge:
        torch.manual_seed(3)
        random.seed(3)
        whole = Run(model_folder, tmp_path / "whole", edge, **options)
        torch.manual_seed(3)
        random.seed(3)
        first = Run(model_folder, tmp_path / "parts", edge, steps=2, **options)
        # The second process begins with other random numbers and nothing of the first one but its folder.
        torch.manual_seed(99)
        random.seed(99)
        second = Run(model_folder, tmp_path / "parts", edge, resume=True, **options)
    assert sorted(second.metrics) == [2, 3]
    assert {**first.asked(), **second.asked()} == whole.asked()
    assert len({tuple(prompts) for batch, prompts in whole.asked().items() if batch.startswith("train")}) == 4
    assert {**first.told(), **second.told()} == whole.told()
    assert {**first.accuracies(), **second.accuracies()} == whole.accuracies()
    assert first.samples | second.samples == whole.samples
    assert first.store.versions | second.store.versions == whole.store.versions
    ends = dict(whole.actor.named_weights())
    for name, tensor in second.actor.named_weights():
        assert torch.equal(tensor, ends[name]), name
    if options is PPO:
        assert {metrics["kl_coef"] for metrics in whole.told().values()} != {0.05}
    for file in ("model.safetensors", "trainer.safetensors", *(["critic.safetensors"] if options is PPO else [])):
        # The second holds the optimizer's and the random state.
        one, other = ((tmp_path / run / "step-000004" / file).read_bytes() for run in ("whole", "parts"))
        assert one == other, file
