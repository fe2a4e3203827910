from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from penstock.errors import MissingExtra, RewardError
from penstock.reward import Sample, Score
from penstock.reward.verifiers.general import _task, exact_match, random_reward, reasoning_gym_exact


@pytest.fixture
def spelling() -> dict[str, object]:
    return {
        "question": "Spell this word backward (example: sun -> nus): penstock",
        "answer": "kcotsnep",
        "metadata": {"source_dataset": "spell_backward"},
        "task_options": {"min_word_len": 3, "max_word_len": 8},
    }


@pytest.mark.parametrize(
    ("response", "value"), [("kcotsnep", 1.0), ("  kcotsnep\n", 1.0), ("kcotsne", 0.0), ("", 0.0), ("penstock", 0.0)]
)
def test_a_task_scores_with_its_own_scorer_and_partial_credit_counts_nothing(
    make_sample: Callable[..., Sample], spelling: dict[str, object], response: str, value: float
) -> None:
    score = reasoning_gym_exact(make_sample(response, **spelling))
    assert score.value == value
    assert (score.parts["raw"] == 1.0) == (value == 1.0)
    assert 0.0 <= score.parts["raw"] <= 1.0


def test_partial_credit_is_shown_beside_the_reward(
    make_sample: Callable[..., Sample], spelling: dict[str, object]
) -> None:
    score = reasoning_gym_exact(make_sample("kcotsnex", **spelling))
    assert score == Score(0.0, {"raw": pytest.approx(7 / 8)})


def test_an_answer_with_something_behind_it_is_never_right(make_sample: Callable[..., Sample]) -> None:
    """The task adds up letters in floating point, and for some lengths comes out above 1 for such an answer."""
    above = 0
    for length in range(1, 60):
        row = {"answer": "x" * length, "metadata": {"source_dataset": "spell_backward"}}
        score = reasoning_gym_exact(make_sample("x" * length + "y", **row))
        assert score.value == 0.0, length
        above += score.parts["raw"] > 1.0
    assert above > 0, "the task's scorer has changed: the reason for this test is gone"


def test_an_item_is_scored_with_the_options_that_it_was_made_with(make_sample: Callable[..., Sample]) -> None:
    row = {"answer": "1", "metadata": {"source_dataset": "chain_sum"}, "task_options": {"min_terms": 2, "max_terms": 3}}
    assert reasoning_gym_exact(make_sample("1", **row)).value == 1.0
    task = _task("chain_sum", '{"max_terms": 3, "min_terms": 2}')
    assert (task.config.min_terms, task.config.max_terms) == (2, 3)
    assert _task("chain_sum", '{"max_terms": 3, "min_terms": 2}') is task


@pytest.mark.parametrize("row", [{"answer": "1"}, {"metadata": "text"}, {"metadata": {}}])
def test_a_row_of_no_task_is_refused(make_sample: Callable[..., Sample], row: dict[str, object]) -> None:
    with pytest.raises(RewardError, match=r"questions.jsonl:8 has no metadata.source_dataset"):
        reasoning_gym_exact(make_sample("1", **row))


def test_a_missing_package_is_named_with_its_extra(
    make_sample: Callable[..., Sample], spelling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    _task.cache_clear()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtra, match=r"spell_backward.*reasoning-gym.*penstock\[train\]"):
        reasoning_gym_exact(make_sample("x", **spelling))


@pytest.mark.parametrize(("answer", "response", "value"), [("42", " 42\n", 1.0), (42, "42", 1.0), ("42", "4 2", 0.0)])
def test_exact_match_compares_with_the_answer(
    make_sample: Callable[..., Sample], answer: object, response: str, value: float
) -> None:
    assert exact_match(make_sample(response, answer=answer)) == Score(value)


@pytest.mark.parametrize("row", [{"question": "?"}, {"answer": None}, {"answer": ["a"]}])
def test_exact_match_needs_an_answer(make_sample: Callable[..., Sample], row: dict[str, object]) -> None:
    with pytest.raises(RewardError, match="'answer'"):
        exact_match(make_sample("x", **row))


def test_the_random_reward_depends_on_the_samples_identity_alone_and_is_even(
    make_sample: Callable[..., Sample],
) -> None:
    rewards = [random_reward(make_sample("right", replica)).value for replica in range(2000)]
    assert rewards == [random_reward(make_sample("wrong", replica)).value for replica in range(2000)]
    assert set(rewards) == {0.0, 1.0}
    assert 900 < sum(rewards) < 1100
