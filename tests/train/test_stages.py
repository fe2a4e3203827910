"""Where a step's time goes, how much computing it was, and the rest of what a step is told by."""

from __future__ import annotations

import asyncio
import math
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeRollout, FakeScorer
from hypothesis import given
from hypothesis import strategies as st
from runs import MakeRun

from penstock.config.train import TrainConfig
from penstock.sample import Sample, Score, Unscored
from penstock.train.batching import collate
from penstock.train.flops import PEAKS, ModelSize, forward_flops, known_peak, learning_flops, measured_peak
from penstock.train.stages import Stages
from penstock.train.tally import STAGES, length_metrics, speed_metrics, stage_metrics


def test_an_inner_stage_has_its_time_and_the_outer_one_the_rest() -> None:
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    stages = Stages(lambda: now)
    spend(5)
    with stages("outer"):
        spend(1)
        with stages("inner"):
            spend(2)
        spend(4)
    spend(8)
    with pytest.raises(ZeroDivisionError), stages("inner"):
        spend(0.5 / 0)
    with stages("inner"):
        spend(0.5)
    stages.move("outer", "other", 1.5)
    stages.move("outer", "other", 100)
    assert stages.take() == {"outer": 0.0, "inner": 2.5, "other": 5.0}
    assert stages.take() == {}


def test_stages_add_up_to_the_step(make_run: MakeRun) -> None:
    slow = FakeRollout(gate=lambda batch, number: 0.01)
    run = make_run(
        rollout=slow, steps=3, checkpoint_every=1, eval_every=1, advantage="gae", epochs=2, mini_batches_per_step=2
    )
    run.trainer.run()
    for metrics in run.metrics.values():
        told = {name: value for name, value in metrics.items() if name.startswith("time/")}
        assert told.keys() == {f"time/{name}_s" for name in (*STAGES, "other")}
        assert sum(told.values()) == pytest.approx(metrics["step_s"])
        # What no stage has is the loop's own doing: records, events, a word to the manager.
        assert told["time/other_s"] < 0.5 * metrics["step_s"]
        assert all(
            told[f"time/{name}_s"] > 0 for name in ("rollout_wait", "advantages", "forward_backward", "optimizer")
        )
    # The checkpoint behind a step's records is in the next step's time.
    assert run.metrics[0]["time/checkpoint_s"] == 0
    assert run.metrics[1]["time/checkpoint_s"] > 0


def test_waiting_for_scores_is_told_apart_from_waiting_for_rollouts(make_run: MakeRun) -> None:
    class Held(FakeScorer):
        """Scores once the trainer waits for nothing else."""

        waits = threading.Event()

        async def score(self, sample: Sample) -> Score | Unscored:
            self.scored.append(sample)
            while not self.waits.is_set():
                await asyncio.sleep(0.001)
            return Score(float(sample.id.replica % 2))

    scorer = Held()

    def watch() -> None:
        if len(scorer.scored) == 16:
            scorer.waits.set()

    run = make_run(scorer=scorer, watch=watch, steps=1, evaluate=False)
    run.trainer.run()
    metrics = run.metrics[0]
    # The first of its looks at what is there comes after a fifth of a second.
    assert metrics["time/scoring_wait_s"] > 0
    assert metrics["time/scoring_wait_s"] <= metrics["trainer_wait_s"]
    prompt = make_run(rollout=FakeRollout(gate=lambda batch, number: 0.002), steps=1, evaluate=False)
    prompt.trainer.run()
    assert prompt.metrics[0]["time/rollout_wait_s"] > 0


def test_a_step_tells_what_an_engineer_looks_for(make_run: MakeRun) -> None:
    chance = random.Random(0)
    run = make_run(
        steps=1,
        scorer=FakeScorer(
            lambda sample: (
                Unscored("away") if str(sample.id).endswith("0.0") else Score(chance.random(), {"length": 1.0})
            )
        ),
        unscored="drop_sample",
        advantage="gae",
        kl_coef=0.1,
        entropy_coef=0.01,
        epochs=3,
        lr=0.05,
        peak_tflops=0.001,
    )
    run.trainer.run()
    metrics = run.metrics[0]
    assert metrics.keys() >= {
        "mfu", "train_tokens_per_s", "rollout_tokens_per_s", "staleness", "clip_fraction", "clip_fraction_low",
        "clip_fraction_high", "kl", "policy_kl", "entropy", "grad_norm", "critic/grad_norm", "reward/length",
        "response_tokens_mean", "response_tokens_p50", "response_tokens_p95", "response_tokens_max", "unscored_share",
        "truncated_share", "learned/flops", "learned/tokens", "learned/output_tokens",
    }  # fmt: skip
    assert metrics["clip_fraction"] == pytest.approx(metrics["clip_fraction_low"] + metrics["clip_fraction_high"])
    assert metrics["clip_fraction_low"] > 0
    assert metrics["unscored_share"] == metrics["unscored"] / 16
    assert all(math.isfinite(value) for value in metrics.values())


def test_what_is_not_known_is_absent_and_no_nan() -> None:
    nothing = {"learned/flops": 0.0, "learned/tokens": 0.0, "learned/output_tokens": 0.0, "looked/flops": 0.0}
    assert speed_metrics(nothing, 0.0, None) == {}
    some = {"learned/flops": 4e9, "learned/tokens": 300.0, "learned/output_tokens": 100.0, "looked/flops": 2e9}
    assert speed_metrics(some, 2.0, None) == {"train_tokens_per_s": 150.0}
    assert speed_metrics(some, 2.0, 1e10)["mfu"] == pytest.approx(0.3)
    assert length_metrics([]) == {}


@given(st.lists(st.integers(1, 100), min_size=1))
def test_percentiles_are_lengths_that_there_were(lengths: list[int]) -> None:
    found = length_metrics(lengths)
    assert found["response_tokens_max"] == max(lengths)
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        value = found[f"response_tokens_{name}"]
        assert value in lengths
        assert sum(length <= value for length in lengths) >= share * len(lengths)
        assert sum(length < value for length in lengths) < share * len(lengths)


def test_time_in_no_stage_is_told_too() -> None:
    assert stage_metrics({"publish": 1.0, "optimizer": 2.0}, 4.0)["time/other_s"] == 1.0
    assert stage_metrics({"publish": 1.0}, 0.999)["time/other_s"] == 0.0


def test_flops_are_those_that_torch_counts(make_run: MakeRun) -> None:
    """But for attention that torch computes by halves, and for the recomputation that it does not do here."""
    from torch.utils.flop_counter import FlopCounterMode

    actor = make_run().trainer.learner.actor
    size = ModelSize.of(actor.model)
    hidden, inner, layers = 32, 64, 2
    assert size.body == layers * (2 * hidden * hidden + 2 * hidden * 16 + 3 * hidden * inner)
    assert size.attention_width == hidden
    prompts, outputs = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13, 14]]
    batch = collate(prompts, outputs, [[-1.0] * 2, [-1.0] * 4], [1.0, -1.0])
    actor.begin_step()
    with FlopCounterMode(display=False) as counter:
        actor.accumulate(batch)
    matrices = learning_flops(size, batch) - 12 * layers * hidden * (4 * 4 + 4 * 4)
    assert matrices == 6.0 * (size.body * batch.tokens + size.head * 6)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(flops for kind, flops in counted.items() if "attention" not in str(kind) and "bmm" not in str(kind))
    assert linear == pytest.approx(matrices, rel=0.01)
    assert actor.looked_flops == 0.0
    with FlopCounterMode(display=False) as counter:
        actor.logprobs(batch)
    assert actor.looked_flops == forward_flops(size, batch)
    counted = counter.get_flop_counts()["Global"]
    linear = sum(flops for kind, flops in counted.items() if "attention" not in str(kind) and "bmm" not in str(kind))
    assert linear == pytest.approx(matrices / 3, rel=0.01)


@pytest.mark.parametrize(
    ("train", "looks"),
    [
        ({}, 0),
        # The reference, beside each learning pass; old log-probabilities and the reference, before; and values.
        ({"kl_coef": 0.1}, 1),
        ({"kl_coef": 0.1, "kl_in": "reward", "old_logprobs": "recompute"}, 2),
        ({"advantage": "gae"}, 1),
    ],
)
def test_passes_without_a_gradient_are_counted_too(make_run: MakeRun, train: dict[str, Any], looks: int) -> None:
    run = make_run(steps=1, evaluate=False, skip_groups_without_signal=False, **train)
    run.trainer.run()
    metrics = run.metrics[0]
    roles = 2 if "advantage" in train else 1
    assert metrics["looked/flops"] == pytest.approx(looks * metrics["learned/flops"] / 3 / roles, rel=0.1)
    assert (metrics["looked/flops"] > 0) == (looks > 0)


def test_a_token_meets_a_few_of_a_mixtures_experts() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mixtral", **sizes, **heads, num_local_experts=4, num_experts_per_tok=2)
    )
    assert ModelSize.of(model).body == 4 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 48


def test_frozen_weights_need_no_gradient() -> None:
    full = ModelSize(100, 10, 100, 10, 1, 8)
    adapters = ModelSize(110, 10, 10, 0, 1, 8)
    batch = collate([[5, 6]], [[7, 8]], [[-1.0, -1.0]], [1.0])
    assert learning_flops(full, batch) == 6 * (100 * 3 + 10 * 2) + 12 * 8 * 9
    assert learning_flops(adapters, batch) == (4 * 110 + 2 * 10) * 3 + 4 * 10 * 2 + 12 * 8 * 9


def test_peaks_are_known_by_name_or_measured() -> None:
    assert known_peak("NVIDIA H100 PCIe", "bfloat16") == PEAKS["H100 PCIe"]
    assert known_peak("NVIDIA H200", "bfloat16") == 989e12
    assert known_peak("NVIDIA A10G", "bfloat16") == 70e12
    assert known_peak("NVIDIA L40S", "bfloat16") == 362e12
    assert known_peak("NVIDIA H200", "float32") is None
    assert known_peak("", "bfloat16") is None
    measured = measured_peak(torch.device("cpu"), "float32")
    assert 1e8 < measured < 1e14
    assert measured_peak(torch.device("cpu"), "float32") == measured
    assert TrainConfig().peak_tflops == 0


def test_two_epochs_learn_from_twice_the_tokens(make_run: MakeRun) -> None:
    options: dict[str, Any] = {"steps": 1, "evaluate": False, "skip_groups_without_signal": False}
    one, two = make_run(**options), make_run(**options, epochs=2)
    for run in (one, two):
        run.trainer.run()
    assert two.metrics[0]["learned/tokens"] == 2 * one.metrics[0]["learned/tokens"]
    assert two.metrics[0]["learned/flops"] == 2 * one.metrics[0]["learned/flops"]
    assert one.metrics[0]["learned/output_tokens"] == one.metrics[0]["response_tokens"]


def test_every_metric_of_a_step_is_in_the_manual(make_run: MakeRun) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    rows = [line for line in page.partition("| metric |")[2].splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    told |= {f"response_tokens{name}" for name in ("_p50", "_p95", "_max")}
    scorer = FakeScorer(lambda sample: Score(float(sample.id.replica % 2), {"style": 1.0}))
    run = make_run(
        scorer=scorer, steps=1, advantage="gae", kl_coef=0.1, old_logprobs="recompute", rollout_correction="token"
    )
    run.trainer.run()
    assert {name for name in run.metrics[0] if not name.startswith("reward/")} <= told
