"""Training while rollouts still run, against waiting for all of them first.

The real loop, manager and agents. The engines are paced: like remote machines they make tokens at a fixed rate and
cost the trainer's processor nothing. Both ways of training work on the very same samples (paced tokens are a function
of the sample's seed), taking turns, so that step times and gradients are compared pair by pair.

The ideal step is max(rollout, training) plus one micro-batch: the last group to come still has to be trained on.
Rollout and training are measured in the step of the pair that waits, where neither slows the other down.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bench.common import Result, at_least, at_most, median, random_llama
from penstock.bench.rig import MadePrompts, Rig, local_rig, one_by_one, timed_step
from penstock.config.run import RunConfig
from penstock.sample import Prompt
from penstock.train.actor import Actor
from penstock.train.batching import collate
from penstock.train.learner import Learner
from penstock.train.loop import Trainer
from penstock.train.mini_batch import OptimizerStep

DESCRIPTION = "training while rollouts still run, against waiting for all of them first"

PROMPTS = 24
SAMPLES_PER_PROMPT = 8
OUTPUT_TOKENS = 48
MICRO_BATCH_SAMPLES = 16
ENGINES = 2
GRADIENT_NOISE = 1e-4


@dataclass
class Pair:
    """One step on the same samples, streamed and waited for."""

    streamed: dict[str, float]
    waited: dict[str, float]
    gradient_gap: float
    """Length of the two gradients' difference over the length of either."""

    @property
    def ideal_s(self) -> float:
        micro_batch_s = self.waited["train_s"] / self.waited["passes"]
        return max(self.waited["rollout_s"], self.waited["train_s"]) + micro_batch_s

    @property
    def sum_s(self) -> float:
        return self.waited["rollout_s"] + self.waited["train_s"]


class RecordingActor(Actor):
    """Keeps a copy of each step's normalised gradient, and stays where it is: no weight moves between two steps."""

    gradient: Sequence[Tensor] = ()

    def optimizer_step(self, position: int) -> OptimizerStep:
        assert self.mini_batch.denominator is not None
        self.gradient = [parameter.grad / self.mini_batch.denominator for parameter in self.model.parameters()]
        kept = [parameter.detach().clone() for parameter in self.model.parameters()]
        done = super().optimizer_step(position)
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), kept, strict=True):
                parameter.copy_(before)
        return done


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 7
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        _small_llama().save_pretrained(Path(name) / "model")
        # A rollout as long as training is the hardest case: there is the most to overlap.
        for regime, share in (("rollout 1.25 x training", 1.25), ("rollout 0.8 x training", 0.8))[: 1 if quick else 2]:
            results += _measure(Path(name), regime, share, repetitions)
    return results


def _measure(folder: Path, regime: str, rollout_over_training: float, repetitions: int) -> list[Result]:
    with _bench(folder, rollout_over_training) as (streaming, waiting, rig):
        pairs = [_pair(streaming, waiting, rig, step) for step in range(repetitions + 1)][1:]
    overlap = [pair.streamed["step_s"] / pair.ideal_s for pair in pairs]
    saved = [pair.waited["step_s"] / pair.streamed["step_s"] for pair in pairs]
    serial = [pair.waited["step_s"] / pair.sum_s for pair in pairs]
    waiting_share = [pair.streamed["trainer_wait_s"] / pair.streamed["step_s"] for pair in pairs]
    rollout_s, train_s = (median([pair.waited[name] for pair in pairs]) for name in ("rollout_s", "train_s"))
    note = f"{rollout_s:.2f} s rollout, {train_s:.2f} s training in {pairs[0].waited['passes']:.0f} micro-batches"
    return [
        at_most(f"step, streamed / ideal overlap ({regime})", median(overlap), 1.10, "ratio", note),
        Result(f"step, waiting / (rollout + training) ({regime})", median(serial), "ratio"),
        at_least(f"step, waiting / streamed ({regime})", median(saved), 1.0, "ratio"),
        Result(f"trainer waits, streamed ({regime})", median(waiting_share), "share of the step"),
        at_most(
            f"gradients, streamed against waiting ({regime})",
            max(pair.gradient_gap for pair in pairs),
            GRADIENT_NOISE,
            "relative difference",
        ),
    ]


def _pair(streaming: Trainer, waiting: Trainer, rig: Rig, step: int) -> Pair:
    metrics, gradients = [], []
    version = max(streaming.version, waiting.version)
    # They take turns in going first, so that a machine that slows down or speeds up favours neither.
    order = (streaming, waiting) if step % 2 else (waiting, streaming)
    for trainer in order:
        trainer.step, trainer.version = step, version
        rig.until_ready(ENGINES, version)
        metrics.append(timed_step(trainer))
        assert isinstance(trainer.learner.actor, RecordingActor)
        gradients.append(trainer.learner.actor.gradient)
        version = trainer.version
    if order[0] is waiting:
        metrics.reverse()
    apart = torch.nn.utils.get_total_norm([one - other for one, other in zip(*gradients, strict=True)])
    return Pair(metrics[0], metrics[1], float(apart / torch.nn.utils.get_total_norm(gradients[0])))


@contextlib.contextmanager
def _bench(folder: Path, rollout_over_training: float) -> Iterator[tuple[Trainer, Trainer, Rig]]:
    """A streaming and a waiting trainer over one actor, manager and fleet."""
    model, prompts = folder / "model", MadePrompts(PROMPTS)
    actor = RecordingActor(
        model, _config(model, 1.0, streaming=True).train, total_optimizer_steps=1, horizon_tokens=OUTPUT_TOKENS
    )
    train_s = _training_s(actor, prompts.for_step(0))
    tokens_per_s = PROMPTS * SAMPLES_PER_PROMPT * OUTPUT_TOKENS / (rollout_over_training * train_s) / ENGINES
    config, other = (_config(model, tokens_per_s, streaming) for streaming in (True, False))
    with local_rig(config, folder, prompts, ENGINES) as rig:
        streaming = Trainer(config, Learner(config, actor), rig.ports)
        waiting = Trainer(other, Learner(config, actor), rig.ports)
        streaming.publish()
        yield streaming, waiting, rig


def _config(model: Path, tokens_per_s: float, streaming: bool) -> RunConfig:
    return one_by_one(
        model, PROMPTS, SAMPLES_PER_PROMPT, OUTPUT_TOKENS, MICRO_BATCH_SAMPLES, tokens_per_s, streaming=streaming
    )


def _training_s(actor: Actor, prompts: Sequence[Prompt]) -> float:
    """Seconds that a step's passes take on their own: the middle of several passes, times their number."""
    outputs = [[k % 100 for k in range(OUTPUT_TOKENS)]] * MICRO_BATCH_SAMPLES
    batch = collate([prompt.token_ids for prompt in prompts[:MICRO_BATCH_SAMPLES]], outputs)
    actor.begin_step()
    taken_s = []
    for _ in range(7):
        began = time.perf_counter()
        actor.accumulate(batch)
        taken_s.append(time.perf_counter() - began)
    actor.begin_step()
    actor.sums.means()
    return median(taken_s) * PROMPTS * SAMPLES_PER_PROMPT / MICRO_BATCH_SAMPLES


def _small_llama() -> Any:
    return random_llama(
        0,
        vocab_size=101,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
