"""Roles and ways of learning beside the plain one: critic, greedy baseline, epochs, KL in the reward, correction."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeScorer
from runs import MakeRun, apart, weights

from penstock.config.run import RunConfig
from penstock.config.train import TrainConfig
from penstock.errors import CheckpointError
from penstock.observe import events
from penstock.sample import Sample, Score, Unscored
from penstock.train.actor import Actor
from penstock.train.batching import collate
from penstock.train.checkpoint import Checkpoints, Position, find_checkpoint, load_checkpoint
from penstock.train.critic import Critic, value_loss
from penstock.train.losses import steered_kl_coef, truncated_importance


def make_critic(folder: Path, **train: Any) -> Critic:
    config = TrainConfig.model_validate({"device": "cpu", **train})
    return Critic(folder, config, total_optimizer_steps=100, horizon_tokens=8, dtype="float32")


def batch_with(returns: float) -> Any:
    import dataclasses

    batch = collate([[5, 6], [7]], [[8, 9, 10], [11]])
    zeros_BT = torch.zeros(batch.mask_BT.shape)
    return dataclasses.replace(batch, values_BT=zeros_BT, returns_BT=torch.where(batch.mask_BT, returns, 0.0))


# ---- critic


def test_the_value_loss_by_hand() -> None:
    values, old, returns = (torch.tensor([[value]]) for value in (1.0, 0.2, 0.0))
    # Free: 1^2; clipped to 0.2 + 0.5: 0.7^2.
    assert float(value_loss(values, old, returns, 0.5)[0]) == pytest.approx(0.5)
    loss, clipped = value_loss(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]), 0.5)
    assert (float(loss), bool(clipped)) == (0.125, True)
    assert float(value_loss(torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]), 0.0)[0]) == 0.0


def test_a_critic_begins_at_zero_and_learns_its_returns(model_folder: Path) -> None:
    critic = make_critic(model_folder, critic={"lr": 3e-3, "clip": 0.0})
    batch = batch_with(0.75)
    begun = critic.with_values(batch).values_BT
    assert begun is not None
    assert not begun.any()
    for position in range(60):
        critic.begin_step()
        critic.accumulate(batch)
        assert critic.optimizer_step(position).applied
    learned = critic.with_values(batch).values_BT
    assert learned is not None
    torch.testing.assert_close(learned[batch.mask_BT].cpu(), torch.full((4,), 0.75), atol=0.1, rtol=0.1)
    assert not learned[~batch.mask_BT].any()


def test_a_run_with_gae_has_a_critic_that_learns_and_says_so(make_run: MakeRun) -> None:
    run = make_run(advantage="gae", critic={"lr": 1e-3}, epochs=2, mini_batches_per_step=2)
    critic = run.trainer.learner.critic
    assert critic is not None
    before = {name: tensor.clone() for name, tensor in critic.named_weights()}
    run.trainer.run()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in critic.named_weights())
    assert {"critic/loss", "critic/value", "critic/return", "critic/clip_fraction"} <= run.metrics[1].keys()
    assert run.metrics[0]["optimizer_steps"] == 4
    # Rewards come at the last token and nothing is discounted: the first mini-batch's returns are the rewards.
    assert run.metrics[0]["critic/return"] > 0


def test_the_critic_may_learn_alone_at_first(make_run: MakeRun) -> None:
    run = make_run(advantage="gae", critic={"alone_steps": 1, "lr": 1e-3}, steps=2, evaluate=False)
    run.trainer.publish()
    before = weights(run)
    run.trainer.train_step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())
    assert run.metrics[0]["optimizer_steps"] == 0
    run.trainer.train_step()
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


def test_an_estimator_that_needs_a_mini_batch_gets_it_whole_and_the_same_however_it_streams(make_run: MakeRun) -> None:
    options: dict[str, Any] = {"advantage": "reinforce_plus_plus", "evaluate": False, "steps": 1}
    one = make_run(**options, min_samples_per_micro_batch=1)
    other = make_run(**options, streaming=False)
    for run in (one, other):
        run.trainer.run()
    # The same samples in other passes: whatever differs is float noise.
    assert apart(one, other) < 1e-6


def test_a_critic_goes_on_from_its_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"device": "cpu", "kl_coef": 0.1, "kl_target": 0.1})

    def actor() -> Actor:
        return Actor(model_folder, config, total_optimizer_steps=4, horizon_tokens=8)

    first, critic = actor(), make_critic(model_folder)
    first.kl_coef, first.steps_skipped = 0.25, 3
    critic.begin_step()
    critic.accumulate(batch_with(1.0))
    critic.optimizer_step(0)
    Checkpoints(tmp_path / "with", 1).save(first, Position(1, 1, 0), critic)
    second, restored = actor(), make_critic(model_folder)
    load_checkpoint(find_checkpoint(tmp_path / "with"), second, restored)
    assert (second.kl_coef, second.steps_skipped) == (0.25, 3)
    for (name, tensor), (_, other) in zip(critic.named_weights(), restored.named_weights(), strict=True):
        assert torch.equal(tensor, other), name
    for mine, its in zip(critic.model.parameters(), restored.model.parameters(), strict=True):
        assert torch.equal(critic.optimizer.state[mine]["exp_avg"], restored.optimizer.state[its]["exp_avg"])
    Checkpoints(tmp_path / "without", 1).save(first, Position(1, 1, 0))
    with pytest.raises(CheckpointError, match=r"critic.safetensors is missing: .* a run without a critic"):
        load_checkpoint(find_checkpoint(tmp_path / "without"), second, restored)


# ---- greedy baseline


def test_remax_has_each_prompt_answered_greedily_once_and_compares_with_that(make_run: MakeRun) -> None:
    run = make_run(advantage="remax", steps=1, evaluate=False)
    run.trainer.run()
    version, sampling, prompts = run.rollout.batches["greedy-0"]
    assert (version, sampling.temperature) == (0, 0.0)
    assert sorted(prompts) == sorted(run.rollout.batches["train-0"][2])
    assert run.rollout.released[:2] == ["greedy-0", "train-0"]
    # Eight further answers are none of the step's samples.
    assert run.metrics[0]["samples"] == 16


def test_a_group_whose_greedy_answer_has_no_score_is_not_learned_from(make_run: MakeRun) -> None:
    def judge(sample: Sample) -> Score | Unscored:
        if sample.id.batch.startswith("greedy"):
            return Unscored("no judge") if sample.id.prompt == lost else Score(0.5)
        return Score(float(sample.id.replica % 2))

    run = make_run(advantage="remax", steps=1, evaluate=False, scorer=FakeScorer(judge))
    lost = run.trainer.ports.prompts.for_step(0)[0].index
    run.trainer.run()
    assert run.metrics[0]["groups"] == 3
    [told] = run.of(events.Unscorable)
    assert told.causes == {"no judge": 1}


# ---- epochs


def test_each_epoch_steps_once_more_over_the_same_mini_batch(make_run: MakeRun) -> None:
    one = make_run(epochs=1, evaluate=False, steps=1, old_logprobs="recompute")
    two = make_run(epochs=3, evaluate=False, steps=1, old_logprobs="recompute")
    for run in (one, two):
        run.trainer.run()
    assert (one.metrics[0]["optimizer_steps"], two.metrics[0]["optimizer_steps"]) == (1, 3)
    assert two.metrics[0]["passes"] == one.metrics[0]["passes"]
    # The old log-probabilities stay those of before the first step, so later epochs have ratios other than 1.
    assert one.metrics[0]["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert abs(two.metrics[0]["ratio"] - 1) > 1e-5
    assert apart(one, two) > 0


# ---- KL


def test_kl_in_the_reward_is_taken_from_each_tokens_reward(make_run: MakeRun) -> None:
    # Equal scores teach nothing; after a step away from the reference only the divergence tells samples apart.
    scorer = FakeScorer(lambda sample: Score(float(sample.id.replica % 2) if sample.id.batch == "train-0" else 1.0))
    plain = make_run(scorer=scorer, evaluate=False, old_logprobs="recompute")
    inside = make_run(
        scorer=scorer, evaluate=False, old_logprobs="recompute", kl_coef=0.5, kl_in="reward", kl_estimator="k1"
    )
    for run in (plain, inside):
        run.trainer.run()
    assert plain.metrics[1]["groups_without_signal"] == 4
    assert inside.metrics[1]["groups_without_signal"] == 0
    assert inside.metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert inside.metrics[1]["kl"] != 0


def test_the_kl_coefficient_is_steered_towards_its_target(make_run: MakeRun) -> None:
    assert steered_kl_coef(1.0, 10.0, 100, TrainConfig(kl_coef=1, kl_target=1, kl_horizon_samples=1000)) == 1.02
    assert steered_kl_coef(1.0, 0.95, 100, TrainConfig(kl_coef=1, kl_target=1, kl_horizon_samples=1000)) == 0.995
    run = make_run(kl_coef=0.1, kl_target=1e6, kl_horizon_samples=160, evaluate=False)
    run.trainer.run()
    # Far below its target, it falls by a fifth of 16 / 160 a step.
    assert run.metrics[0]["kl_coef"] == pytest.approx(0.1)
    assert run.metrics[1]["kl_coef"] == pytest.approx(0.1 * 0.98)


# ---- correction


def test_importance_is_truncated_and_padding_counts_for_nothing() -> None:
    old = torch.tensor([[math.log(0.4), math.log(0.1), 5.0]])
    engine = torch.tensor([[math.log(0.1), math.log(0.2), -5.0]])
    mask_BT = torch.tensor([[True, True, False]])
    torch.testing.assert_close(truncated_importance(old, engine, mask_BT, 3.0), torch.tensor([[3.0, 0.5, 1.0]]))
    torch.testing.assert_close(
        truncated_importance(old, engine, mask_BT, 3.0, sequence=True), torch.tensor([[2.0, 2.0, 1.0]])
    )


def test_rollout_correction_weighs_the_loss(make_run: MakeRun) -> None:
    options: dict[str, Any] = {"old_logprobs": "recompute", "evaluate": False, "steps": 1}
    off = make_run(**options)
    token = make_run(**options, rollout_correction="token", rollout_correction_cap=1.5)
    for run in (off, token):
        run.trainer.run()
    assert "rollout_correction" not in off.metrics[0]
    assert 0 < token.metrics[0]["rollout_correction"] <= 1.5
    assert apart(off, token) > 0


@pytest.mark.parametrize(
    ("train", "sampling", "message"),
    [
        ({"rollout_correction": "token"}, {}, 'needs train.old_logprobs="recompute"'),
        ({"rollout_correction": "token", "old_logprobs": "recompute"}, {"temperature": 0.5}, "temperature=0.5"),
        ({"kl_in": "reward"}, {}, "need a train.kl_coef above 0"),
        ({"cov_low": 3.0, "cov_high": 2.0}, {}, "cov_low must be below"),
        ({"epochs": 0}, {}, "epochs"),
    ],
)
def test_settings_that_make_no_sense_are_refused(train: dict[str, Any], sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"train": [{"kind": "jsonl", "path": "a"}]},
                "rollout": {"sampling": sampling},
                "train": train,
            }
        )
