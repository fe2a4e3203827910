"""Adapters: they alone are learned; engines and checkpoints get whole weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import written
from runs import MakeRun

from penstock.config.train import TrainConfig
from penstock.errors import CheckpointError, ConfigError, MissingExtra
from penstock.train.actor import Actor
from penstock.train.batching import collate
from penstock.train.checkpoint import Checkpoints, Position, find_checkpoint, load_checkpoint
from penstock.train.forward import score_tokens
from penstock.train.loading import load_causal_lm

BATCH = ([[5, 6], [7]], [[8, 9, 10], [11]], [[-4.0] * 3, [-4.0]], [1.0, -1.0])


def make_actor(folder: Path, rank: int = 4, **train: Any) -> Actor:
    lora = {"rank": rank, "alpha": 8.0, **train.pop("lora", {})}
    config = TrainConfig.model_validate({"lr": 1e-2, "device": "cpu", "lora": lora, **train})
    return Actor(folder, config, total_optimizer_steps=10, horizon_tokens=8)


def learn(actor: Actor, steps: int = 3) -> None:
    for position in range(steps):
        actor.begin_step()
        actor.accumulate(collate(*BATCH))
        assert actor.optimizer_step(position).applied


def test_adapters_begin_as_nothing_and_are_all_that_is_learned(model_folder: Path) -> None:
    actor, plain = make_actor(model_folder), load_causal_lm(model_folder)
    sent = written(actor.named_tensors())
    assert [(name, shape) for name, _, shape in actor.named_shapes()] == [
        (name, shape) for name, _, shape, _ in actor.named_tensors()
    ]
    whole = {name: tensor.numpy().tobytes() for name, tensor in plain.state_dict().items()}
    assert all(sent[name] == whole[name] for name in sent)
    assert len(actor.learned) == 2 * 2 * 7
    before = {name: tensor.clone() for name, tensor in actor.named_weights()}
    learn(actor)
    changed = {name for name, tensor in actor.named_weights() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".lora_A." in name or ".lora_B." in name for name in changed)


def test_engines_get_whole_weights_that_say_what_the_trainer_says(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    learn(actor)
    merged = load_causal_lm(model_folder)
    names = dict(merged.named_parameters())
    with torch.no_grad():
        for name, tensor in actor.whole_weights():
            assert name in names or name == "lm_head.weight"
            names[name].copy_(tensor)
    expected = actor.logprobs(collate(*BATCH))
    torch.testing.assert_close(score_tokens(merged, collate(*BATCH)).logprobs_BT, expected, atol=1e-5, rtol=1e-5)
    assert (expected - make_actor(model_folder).logprobs(collate(*BATCH))).abs().max() > 1e-3


def test_the_reference_is_the_model_without_its_adapters(model_folder: Path) -> None:
    actor, whole = make_actor(model_folder, kl_coef=0.1), make_actor(model_folder, rank=0, kl_coef=0.1)
    assert actor.reference is None
    assert whole.reference is not None
    learn(actor)
    actor.sums.means()
    actor.begin_step()
    actor.accumulate(collate(*BATCH))
    # Away from the reference, so it is another policy than the one that learned.
    assert actor.sums.means()["kl"] > 1e-4
    batch = collate(*BATCH)
    torch.testing.assert_close(actor._reference_logprobs(batch), whole._reference_logprobs(batch))


def test_a_checkpoint_is_a_whole_model_and_adapters_to_go_on_with(model_folder: Path, tmp_path: Path) -> None:
    actor = make_actor(model_folder)
    learn(actor)
    Checkpoints(tmp_path, 1).save(actor, Position(3, 3, 0))
    path = find_checkpoint(tmp_path)
    again = make_actor(model_folder)
    load_checkpoint(path, again)
    for (name, tensor), (_, other) in zip(actor.named_weights(), again.named_weights(), strict=True):
        assert torch.equal(tensor, other), name
    learn(actor, 1)
    learn(again, 1)
    for (name, tensor), (_, other) in zip(actor.named_weights(), again.named_weights(), strict=True):
        assert torch.equal(tensor, other), name
    merged = load_causal_lm(path)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(path, make_actor(model_folder, lora={"targets": ["q_proj"]}))


def test_targets_name_the_layers_that_get_adapters(model_folder: Path) -> None:
    actor = make_actor(model_folder, lora={"targets": ["q_proj", "v_proj"]})
    assert len(actor.learned) == 2 * 2 * 2
    with pytest.raises(ConfigError, match=r'train.lora.targets=\["nothing"\]'):
        make_actor(model_folder, lora={"targets": ["nothing"]})
    with pytest.raises(ConfigError, match=r'train.lora.targets=\["lm_head"\] names the model\'s head'):
        make_actor(model_folder, lora={"targets": ["lm_head"]})


def test_layers_that_keep_their_weights_the_other_way_round_are_merged_so(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_head=4, n_layer=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    actor = make_actor(tmp_path, lora={"targets": ["c_attn", "c_proj", "c_fc"]})
    learn(actor)
    merged = load_causal_lm(tmp_path)
    names = dict(merged.named_parameters())
    with torch.no_grad():
        for name, tensor in actor.whole_weights():
            names[name].copy_(tensor)
    expected = actor.logprobs(collate(*BATCH))
    torch.testing.assert_close(score_tokens(merged, collate(*BATCH)).logprobs_BT, expected, atol=1e-5, rtol=1e-5)
    assert (expected - make_actor(tmp_path).logprobs(collate(*BATCH))).abs().max() > 1e-3


def test_without_the_extra_it_is_named(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtra, match="lora"):
        make_actor(model_folder)


def test_a_run_with_adapters_publishes_whole_weights_that_move(make_run: MakeRun) -> None:
    run = make_run(lora={"rank": 4}, lr=1e-2, evaluate=False, kl_coef=0.01, epochs=2)
    run.trainer.run()
    first, last = run.store.versions[0], run.store.versions[2]
    assert first.keys() == last.keys()
    assert any(first[name] != last[name] for name in first)
    assert not any("lora" in name for name in first)
