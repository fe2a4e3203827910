"""Training while rollouts still run, against waiting for all of them first.

The real loop, manager and agents. The engines are paced: like remote machines they make tokens at a fixed rate and
cost the trainer's processor nothing. Both ways of training work on the very same samples (paced tokens are a function
of the sample's seed), taking turns, so that step times and gradients are compared pair by pair.

The ideal step is max(rollout, training) plus one micro-batch: the last group to come still has to be trained on.
Rollout and training are measured in the step of the pair that waits, where neither slows the other down.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.bench.common import Result, at_least, at_most, median
from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded
from penstock.observe.events import Event
from penstock.reward.scorer import Scorer
from penstock.rollout.client import RolloutClient
from penstock.sample import Prompt
from penstock.train.actor import Actor
from penstock.train.batching import collate
from penstock.train.checkpoint import Checkpoints
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer, TrainerPorts
from penstock.train.mini_batch import OptimizerStep
from penstock.train.processes import LocalProcesses
from penstock.weights import WeightStore
from penstock.wire import FleetStatus

DESCRIPTION = "training while rollouts still run, against waiting for all of them first"

PROMPTS = 24
SAMPLES_PER_PROMPT = 8
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 48
MICRO_BATCH_SAMPLES = 16
ENGINES = 2
GRADIENT_NOISE = 1e-4
CALL_S = 60.0


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


class _SamePrompts:
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def for_step(self, step: int) -> Sequence[Prompt]:
        return self._prompts


def run(quick: bool) -> list[Result]:
    repetitions = 3 if quick else 7
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        _small_model(Path(name) / "model")
        # A rollout as long as training is the hardest case: there is the most to overlap.
        for regime, share in (("rollout 1.25 x training", 1.25), ("rollout 0.8 x training", 0.8))[: 1 if quick else 2]:
            results += _measure(Path(name), regime, share, repetitions)
    return results


def _measure(folder: Path, regime: str, rollout_over_training: float, repetitions: int) -> list[Result]:
    before = torch.get_num_threads()
    try:
        with _bench(folder, rollout_over_training) as (streaming, waiting, ready):
            pairs = [_pair(streaming, waiting, ready, step) for step in range(repetitions + 1)][1:]
    finally:
        torch.set_num_threads(before)
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


def _pair(streaming: Trainer, waiting: Trainer, ready: Any, step: int) -> Pair:
    metrics, gradients = [], []
    version = max(streaming.version, waiting.version)
    # They take turns in going first, so that a machine that slows down or speeds up favours neither.
    order = (streaming, waiting) if step % 2 else (waiting, streaming)
    for trainer in order:
        trainer.step, trainer.version = step, version
        ready(version)
        metrics.append(trainer.train_step())
        assert isinstance(trainer.learner.actor, RecordingActor)
        gradients.append(trainer.learner.actor.gradient)
        version = trainer.version
    if order[0] is waiting:
        metrics.reverse()
    apart = torch.nn.utils.get_total_norm([one - other for one, other in zip(*gradients, strict=True)])
    return Pair(metrics[0], metrics[1], float(apart / torch.nn.utils.get_total_norm(gradients[0])))


@contextlib.contextmanager
def _bench(folder: Path, rollout_over_training: float) -> Iterator[tuple[Trainer, Trainer, Any]]:
    """A streaming and a waiting trainer over one actor, manager and fleet, and a wait for all instances to be ready."""
    actor = _actor(folder / "model")
    prompts = _prompts()
    train_s = _training_s(actor, prompts)
    tokens_per_s = PROMPTS * SAMPLES_PER_PROMPT * OUTPUT_TOKENS / (rollout_over_training * train_s)
    config = _config(folder / "model", tokens_per_s / ENGINES, streaming=True)
    token = secrets.token_urlsafe(16)
    status: list[FleetStatus] = []
    seen: list[Event] = []
    with contextlib.ExitStack() as parts:
        processes = LocalProcesses(config, folder, token, seen.append)
        parts.callback(processes.close)
        url = processes.start_manager()
        for _ in range(ENGINES):
            processes.start_engine(url, "the benchmark starts")
        store = WeightStore("streaming", "127.0.0.1", 0, token)
        source = store.start()
        parts.callback(store.close)
        edge = parts.enter_context(EdgeLoop())
        scorer = edge.run(_open_scorer(), "loading the reward function", CALL_S)
        parts.callback(lambda: edge.run(scorer.close(), "closing the scorer", CALL_S))
        client = RolloutClient(url, token, seen.append, status.append)
        edge.run(client.connect(), "connecting to the manager", CALL_S)
        parts.callback(lambda: edge.run(client.close(), "closing the manager's socket", CALL_S))
        ports = TrainerPorts(
            rollout=client,
            scorer=scorer,
            weights=store,
            weights_source=source,
            decoder=_Decoder(),
            prompts=_SamePrompts(prompts),
            eval_prompts=(),
            stop_ids=(),
            edge=edge,
            emit=seen.append,
            record=lambda step, metrics: None,
            checkpoints=Checkpoints(folder / "checkpoints", 1),
            watch=processes.check_manager,
        )

        def ready(version: int) -> None:
            """Waits until every instance holds `version`, so that loading it is in nobody's step."""
            deadline = time.monotonic() + CALL_S
            while not (status and _all_ready(status[-1], version)):
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(f"{ENGINES} instances were not ready with version {version} in {CALL_S:g} s")
                time.sleep(0.02)

        streaming = Trainer(config, Learner(config, actor), ports)
        waiting = Trainer(
            _config(folder / "model", tokens_per_s / ENGINES, streaming=False), Learner(config, actor), ports
        )
        streaming.publish()
        yield streaming, waiting, ready


def _all_ready(status: FleetStatus, version: int) -> bool:
    holding = [row for row in status.instances if row.state == "ready" and row.version == version]
    return len(holding) == ENGINES


async def _open_scorer() -> Scorer:
    scorer = Scorer("penstock.reward.verifiers:random_reward")
    await scorer.start()
    return scorer


class _Decoder:
    """Paced tokens say nothing; their text is their numbers."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))


def _prompts() -> list[Prompt]:
    return [
        Prompt(k, "", [(k * 7 + position) % 100 for position in range(PROMPT_TOKENS)], {}, f"made[{k}]")
        for k in range(PROMPTS)
    ]


def _config(model: Path, tokens_per_s: float, streaming: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": [{"kind": "jsonl", "path": "unused"}], "max_prompt_tokens": PROMPT_TOKENS},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "heartbeat_s": 2.0,
                "max_pending_per_instance": 8,
                "sampling": {"max_new_tokens": OUTPUT_TOKENS},
                # Few at once, so that samples finish one after another, as with answers of many lengths.
                "engines": {"tokens_per_s": tokens_per_s, "max_running": 4, "frame_steps": 4},
            },
            "train": {
                "device": "cpu",
                "threads": 1,
                "lr": 1e-6,
                "old_logprobs": "recompute",
                "skip_groups_without_signal": False,
                "tokens_per_micro_batch": MICRO_BATCH_SAMPLES * (PROMPT_TOKENS + OUTPUT_TOKENS),
                "min_samples_per_micro_batch": MICRO_BATCH_SAMPLES,
                "streaming": streaming,
            },
        }
    )


def _actor(model: Path) -> RecordingActor:
    config = _config(model, 1.0, streaming=True).train
    return RecordingActor(model, config, total_optimizer_steps=1, horizon_tokens=OUTPUT_TOKENS)


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


def _small_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
