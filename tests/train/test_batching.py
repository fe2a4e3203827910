from __future__ import annotations

import itertools
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.batching import collate, split_passes
from penstock.train.schedule import lr_at


def test_a_pass_is_laid_out_by_hand() -> None:
    batch = collate(
        [[11, 12, 13], (21,)],
        [array("i", [14, 15]), array("i", [22, 23, 24])],
        [array("f", [-1.0, -2.0]), array("f", [-3.0, -4.0, -5.0])],
        [0.5, -0.5],
    )
    assert batch.input_ids_F.tolist() == [11, 12, 13, 14, 21, 22, 23]
    assert batch.layout.row_F.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert batch.layout.position_F.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.output_ids_BT.tolist() == [[14, 15, 0], [22, 23, 24]]
    assert batch.mask_BT.tolist() == [[True, True, False], [True, True, True]]
    assert batch.rollout_logprobs_BT.tolist() == [[-1.0, -2.0, 0.0], [-3.0, -4.0, -5.0]]
    # The token before each output token is the one that predicts it.
    assert batch.at_N.tolist() == [2, 3, 4, 5, 6]
    assert batch.output_ids_N.tolist() == [14, 15, 22, 23, 24]
    assert batch.tokens == 7


def test_what_the_model_did_not_say_is_fed_and_not_learned() -> None:
    batch = collate([[1]], [[2, 3, 4, 5]], advantages=[2.0], learned=[[True, False, False, True]])
    assert batch.input_ids_F.tolist() == [1, 2, 3, 4]
    assert batch.output_ids_BT.tolist() == [[2, 3, 4, 5]]
    assert batch.output_ids_N.tolist() == [2, 5]
    assert batch.at_N.tolist() == [0, 3]
    assert batch.advantages_BT.tolist() == [[2.0, 0.0, 0.0, 2.0]]


def test_a_pass_needs_tokens_on_both_sides() -> None:
    for prompts, outputs in (([], []), ([[]], [[1]]), ([[1]], [[]])):
        with pytest.raises(ValueError, match="at least one"):
            collate(prompts, outputs)


@given(lengths=st.lists(st.integers(1, 50), max_size=40), budget=st.integers(1, 200))
def test_every_sample_is_in_one_pass_and_passes_keep_the_budget(lengths: list[int], budget: int) -> None:
    passes = split_passes(lengths, budget)
    assert sorted(k for rows in passes for k in rows) == list(range(len(lengths)))
    for rows in passes:
        assert sum(lengths[k] for k in rows) <= budget or len(rows) == 1
    # No two neighbours would have fitted into one.
    assert all(sum(lengths[k] for k in one) + lengths[other[0]] > budget for one, other in itertools.pairwise(passes))


def test_passes_gather_samples_of_like_length() -> None:
    assert split_passes([2, 9, 3, 10, 2], 19) == [[3, 1], [2, 0, 4]]


def test_the_learning_rate_warms_up_and_falls() -> None:
    def rates(schedule: str, total: int = 6, warmup: int = 2) -> list[float]:
        return [lr_at(k, peak=1.0, total=total, warmup=warmup, schedule=schedule) for k in range(total)]  # type: ignore[arg-type]

    assert rates("constant") == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])
    assert rates("linear") == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25])
    assert rates("cosine") == pytest.approx([1 / 3, 2 / 3, 1, 0.8535534, 0.5, 0.1464466])
    assert lr_at(99, peak=1.0, total=6, warmup=2, schedule="linear") == 0.0


def test_padding_is_masked_out_of_every_column() -> None:
    batch = collate([[5] * 9, [6]], [[7], [8] * 5])
    assert int(batch.mask_BT.sum()) == batch.at_N.numel() == 6
    assert torch.equal(batch.output_ids_BT[~batch.mask_BT], torch.zeros(4, dtype=torch.int64))
