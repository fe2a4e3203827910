"""A run of 4 steps, and one of 2 steps that is resumed for 2: the real loop and actor, with rollouts that follow from
the sample's identity and the published weights alone, are the same run bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from array import array
from collections.abc import Callable, Mapping, Sequence
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


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name not in TIMES and not name.startswith("time/")}


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
            record=self._record,
            record_samples=lambda step, samples: self.samples.update(
                {sample.id: (step, sample.response, sample.score) for sample in samples}
            ),
            checkpoints=Checkpoints(folder, 3),
        )
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        Trainer(config, Learner(config, self.actor, self.critic), ports, start_step=start).run()

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics[step] = dict(metrics)
        with (self.folder.parent / f"{self.folder.name}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

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
        return {step: timeless(metrics) for step, metrics in self.metrics.items()}

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


class Moments:
    """Counts what a run does, before and after each of it; `fatal` is the one at which its process gets SIGKILL."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fatal = -1
        self.names: list[str] = []
        parts: list[tuple[Any, list[str]]] = [
            (Actor, ["begin_step", "with_old_logprobs", "accumulate", "optimizer_step", "named_tensors"]),
            (Critic, ["with_values", "accumulate", "optimizer_step"]),
            (FakeRollout, ["submit", "release", "report_step", "publish"]),
            (Run, ["_record"]),
            # The thread that writes a checkpoint does these, whatever the main one is at.
            (os, ["fsync", "replace"]),
        ]
        for owner, methods in parts:
            for name in methods:
                monkeypatch.setattr(owner, name, self._seen(f"{owner.__name__}.{name}", getattr(owner, name)))

    def _seen(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*arguments: Any, **options: Any) -> Any:
            self._pass(f"before {name}")
            result = function(*arguments, **options)
            self._pass(f"after {name}")
            return result

        return seen

    def _pass(self, name: str) -> None:
        if len(self.names) == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


KILLS = 6


@pytest.mark.slow
def test_a_run_killed_anywhere_in_a_step_goes_on_as_the_one_that_was_not(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL at moments spread over the whole run: in passes, optimizer steps, the words with the manager, the
    publishing, half-written checkpoints. Metrics of every step and the last checkpoint's bytes are those of a whole
    run."""
    options = {**PPO, "checkpoint_every": 1}
    moments = Moments(monkeypatch)

    def go(folder: Path, seed: int, *, resume: bool) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        with EdgeLoop() as edge:
            Run(model_folder, folder, edge, resume=resume, **options)

    go(tmp_path / "whole", 3, resume=False)
    names = list(moments.names)
    chance = random.Random(os.environ.get("PENSTOCK_KILL_SEED", "7"))
    first = next(k for k, name in enumerate(names) if "replace" in name)
    size = (len(names) - first) / KILLS
    fatal = [int(first + (k + chance.random()) * size) for k in range(KILLS)]
    expected = {row["step"]: timeless(row) for row in read_rows(tmp_path / "whole.jsonl")}
    died_at = []
    for moment in fatal:
        folder = tmp_path / f"killed-{moment}"
        child = os.fork()
        if child == 0:
            moments.names.clear()
            moments.fatal = moment
            go(folder, 3, resume=False)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            # The checkpoint's thread is in another order with the main one, and this run had fewer moments left.
            assert os.waitstatus_to_exitcode(status) == 0
            continue
        died_at.append(moment)
        if not any(folder.glob("step-*")):
            # Before its first checkpoint was whole there is nothing to go on from, and nothing that looks like it.
            continue
        go(folder, 99, resume=True)
        rows = {row["step"]: timeless(row) for row in read_rows(tmp_path / f"killed-{moment}.jsonl")}
        assert rows == expected, names[moment]
        for file in ("model.safetensors", "trainer.safetensors", "critic.safetensors"):
            one, other = (path / "step-000004" / file for path in (tmp_path / "whole", folder))
            assert one.read_bytes() == other.read_bytes(), (names[moment], file)
    assert len(died_at) > KILLS / 2


def read_rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
