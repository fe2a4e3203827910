"""Two ranks learn what one does: torchrun, gloo and FSDP2 as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_scenes
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.train.batching import split_passes
from penstock.train.learner import Learner
from penstock.train.loading import load_causal_lm
from penstock.train.losses import token_weights
from penstock.train.policy_losses import ppo_clip
from penstock.train.ranks import BeginStep, Ranks, pack, unpack

SCRIPT = Path(rank_scenes.__file__)
PATIENCE_S = 480


def torchrun(ranks: int, *words: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def learned(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank and two ranks came to in every scene."""
    out = tmp_path_factory.mktemp("ranks")
    rank_scenes.main(model_folder, out)
    torchrun(2, str(SCRIPT), str(model_folder), str(out))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("scene", [*rank_scenes.SCENES, "resumed"])
def test_two_ranks_learn_what_one_learns(learned: Path, scene: str) -> None:
    one: dict[str, torch.Tensor] = torch.load(learned / f"{scene}-1.pt")
    two: dict[str, torch.Tensor] = torch.load(learned / f"{scene}-2.pt")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        # Adam's first step is the gradient's sign alone, and signs of what is nearly nothing may differ.
        gap = (tensor.double() - two[name].double()).norm() / tensor.double().norm().clamp_min(1e-9)
        assert float(gap) < (1e-4 if "exp_avg" not in name else 1e-3), name


@pytest.mark.slow
def test_any_number_of_ranks_reads_what_any_number_wrote_to_the_last_bit(learned: Path, model_folder: Path) -> None:
    """Weights, optimizers and critic; from one to two (as the scenes went on), from two to one and to three."""
    written = learned / "checkpoints-2" / "step-000002"
    rank_scenes.restore(model_folder, learned / "again-2-to-1", written)
    torchrun(3, str(SCRIPT), str(model_folder), str(learned / "again-2-to-3"), str(written))
    for before, after in ((1, 2), (2, 1), (2, 3)):
        source = learned / f"checkpoints-{before}" / "step-000002"
        again = learned / f"again-{before}-to-{after}" / "step-000002"
        assert len(list(again.glob("critic*.safetensors"))) == after
        one, other = rank_scenes.whole_state(source), rank_scenes.whole_state(again)
        assert one.keys() == other.keys()
        assert any("exp_avg_sq" in name for name in one)
        assert any(name.startswith("weight/head") for name in one)
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), (before, after, name)


@pytest.mark.slow
def test_each_rank_has_a_random_state_of_its_own_and_finds_it_again(learned: Path) -> None:
    def states(folder: Path) -> dict[str, torch.Tensor]:
        kept = rank_scenes.whole_state(folder / "step-000002", random_too=True)
        return {name: tensor for name, tensor in kept.items() if name.startswith("random/")}

    before, same = states(learned / "checkpoints-2"), states(learned / "same-2")
    assert sorted(before) == ["random/cpu", "random/cpu/1"]
    assert all(torch.equal(before[name], same[name]) for name in before)
    # A rank that there was not before has neither the leader's state nor another's.
    grown = states(learned / "again-1-to-2")
    assert torch.equal(grown["random/cpu"], states(learned / "checkpoints-1")["random/cpu"])
    assert not torch.equal(grown["random/cpu"], grown["random/cpu/1"])


@pytest.mark.slow
def test_torchs_own_tools_read_what_two_ranks_wrote(learned: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    checkpoint = learned / "checkpoints-2" / "step-000002"
    found = HuggingFaceStorageReader(str(checkpoint)).read_metadata()
    whole = rank_scenes.whole_state(checkpoint)
    assert {name: tuple(found.state_dict_metadata[name].size) for name in whole} == {
        name: tuple(tensor.shape) for name, tensor in whole.items()
    }
    assert any(len(known.chunks) == 2 for known in found.state_dict_metadata.values())


def test_the_gradient_of_a_streamed_packed_step_is_that_of_one_padded_batch(learned: Path, model_folder: Path) -> None:
    """One forward pass of transformers' own, right-padded, loss and gradient written out, against two ranks."""
    expected = padded_gradient(model_folder)
    for ranks in (1, 2):
        found = torch.load(learned / f"gradient-{ranks}.pt")
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-5, (ranks, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_half_precision_is_of_the_passes_alone_and_near_the_whole(
    learned: Path, model_folder: Path, ranks: int
) -> None:
    expected, found = padded_gradient(model_folder), torch.load(learned / f"gradient-bfloat16-{ranks}.pt")
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        # bfloat16 has eight bits: within a few of their roundings, and not within float32's.
        assert 1e-4 < float((found[name] - gradient).norm() / gradient.norm()) < 0.1, (ranks, name)
    kept = rank_scenes.whole_state(learned / "half" / f"gradient-{ranks}" / "step-000002")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


def padded_gradient(model: Path) -> dict[str, torch.Tensor]:
    """Of the mean over tokens of ppo_clip's loss, over groups whose advantages are not all 0."""
    from penstock.train.advantages import grpo

    lm = load_causal_lm(model)
    lm.set_attn_implementation("eager")
    kept = [group for group in rank_scenes.groups() if len({sample.score.value for sample in group.samples}) > 1]
    samples = [sample for group in kept for sample in group.samples]
    group_B = torch.tensor([k for k, group in enumerate(kept) for _ in group.samples])
    advantages_B = grpo(torch.tensor([sample.score.value for sample in samples]), group_B)  # type: ignore[union-attr]
    width = max(len(sample.prompt.token_ids) + len(sample.token_ids) for sample in samples)
    longest = max(len(sample.token_ids) for sample in samples)
    ids, logprobs = torch.zeros(len(samples), width, dtype=torch.int64), torch.zeros(len(samples), longest)
    mask, columns = torch.zeros(len(samples), longest, dtype=torch.bool), torch.zeros(len(samples), longest).long()
    for row, sample in enumerate(samples):
        whole = [*sample.prompt.token_ids, *sample.token_ids]
        ids[row, : len(whole)] = torch.tensor(whole)
        size = len(sample.token_ids)
        logprobs[row, :size] = torch.tensor(list(sample.logprobs))
        mask[row, :size] = True
        columns[row, :size] = torch.arange(size) + len(sample.prompt.token_ids) - 1
    table = lm(ids, use_cache=False).logits.float().log_softmax(dim=-1)
    rows = torch.arange(len(samples)).unsqueeze(1)
    next_ids = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
    new = table[rows, columns, next_ids[rows, columns]]
    loss = ppo_clip(new, logprobs, advantages_B.unsqueeze(1), 0.2, 0.2).loss_BT
    weights = token_weights(mask, "token-mean", 8)
    ((weights.weights_BT * loss).sum() / weights.denominator).backward()
    return {name: parameter.grad for name, parameter in lm.named_parameters()}


@given(
    lengths=st.lists(st.integers(1, 60), max_size=40),
    budget=st.integers(1, 200),
    ranks=st.integers(2, 5),
)
def test_ranks_get_as_many_passes_each_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    passes = split_passes(lengths, budget, ranks)
    assert sorted(k for rows in passes for k in rows) == list(range(len(lengths)))
    assert len(passes) % ranks == 0
    for rows in passes:
        assert sum(lengths[k] for k in rows) <= budget or len(rows) == 1


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    lengths = [1 + 7 * k % 97 for k in range(400)]
    passes = split_passes(lengths, 2000, 4)
    tokens = [sum(sum(lengths[k] for k in rows) for rows in passes[rank::4]) for rank in range(4)]
    assert max(tokens) <= 1.01 * min(tokens)


def test_groups_cross_as_they_are() -> None:
    sent = rank_scenes.groups()
    known = sent[0].samples[0]
    known.old_logprobs, known.reference_logprobs, known.values = (
        array("f", [number - k for k in range(len(known.token_ids))]) for number in (-1.0, -2.0, -3.0)
    )
    for before, after in zip(sent, unpack(pack(sent)), strict=True):
        assert list(after.prompt.token_ids) == list(before.prompt.token_ids)
        assert [(s.id, s.token_ids, s.logprobs, s.score) for s in after.samples] == [
            (s.id, s.token_ids, s.logprobs, s.score) for s in before.samples
        ]
        assert [(s.old_logprobs, s.reference_logprobs, s.values) for s in after.samples] == [
            (s.old_logprobs, s.reference_logprobs, s.values) for s in before.samples
        ]


def test_a_process_alone_sends_nothing_and_half_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Ranks.from_environment()
    assert (alone.rank, alone.size, alone.leads) == (0, 1, True)
    alone.tell(BeginStep(0, 0.0))
    assert alone.collect(b"mine") == [b"mine"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun sets both"):
        Ranks.from_environment()


def test_a_run_that_broke_off_in_the_middle_of_what_ranks_do_together_is_known() -> None:
    class Two(Ranks):
        def tell(self, order: Any) -> None:
            raise RuntimeError("the other rank is gone")

    learner = Learner.__new__(Learner)
    learner.ranks, learner._under_way = Two(0, 2), False
    learner.actor = SimpleNamespace(kl_coef=0.0)  # type: ignore[assignment]
    assert learner.in_step
    with pytest.raises(RuntimeError, match="gone"):
        learner.begin_step(0)
    assert not learner.in_step
