from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import RewardError
from penstock.reward import Sample, Score, Scorer, Unscored, compose
from penstock.reward.verifiers import exact_match, format_match, regex_match, within_tags

V = "penstock.reward.verifiers:"
WELL = "<think>so</think><answer>42</answer>"


def parts(**changes: Any) -> dict[str, Any]:
    right = {"function": V + "within_tags", "name": "right", "options": {"verifier": V + "exact_match"}}
    return {"parts": [right, {"function": V + "format_match", "weight": 0.5} | changes]}


@pytest.mark.parametrize("mode", ["inline", "process"])
async def test_a_weighted_sum_is_declared_by_options_alone(make_sample: Callable[..., Sample], mode: str) -> None:
    scorer = Scorer(V + "weighted", options=parts(), mode=mode, processes=1, timeout_s=60)
    result = await scorer.score(make_sample(WELL))
    assert isinstance(result, Score)
    assert result.value == 1.5
    assert (result.parts["right"], result.parts["right.tagged"], result.parts["format_match"]) == (1.0, 1.0, 1.0)
    half = await scorer.score(make_sample("<answer>42</answer>"))
    assert isinstance(half, Score)
    assert half.value == 1.0
    await scorer.close()


async def test_one_part_that_is_unscored_leaves_the_sample_unscored(make_sample: Callable[..., Sample]) -> None:
    scorer = Scorer(V + "weighted", options=parts())
    result = await scorer.score(make_sample(WELL, question="?"))
    assert isinstance(result, Unscored)
    assert result.cause.startswith("right: ")
    await scorer.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs the option 'parts'"),
        ({"parts": []}, "at least one part"),
        (parts(weigth=1.0), r"option 'parts\.1\.weigth'"),
        (parts(function=V + "nothing"), "has no 'nothing'"),
        (parts(name="right"), "two parts called 'right'"),
        (parts(options={"tag": 1}), "has no option 'tag'; did you mean 'tags'"),
    ],
)
def test_parts_that_cannot_be_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Scorer(V + "weighted", options=options)


def test_only_what_stands_in_the_last_tag_is_seen(make_sample: Callable[..., Sample]) -> None:
    verify = within_tags(exact_match)
    assert verify(make_sample("<answer>1</answer> no, <answer> 42 </answer>!")) == Score(1.0, {"tagged": 1.0})
    assert verify(make_sample("42")) == Score(0.0, {"tagged": 0.0})
    assert verify(make_sample("</answer>42<answer>")) == Score(0.0, {"tagged": 0.0})
    assert within_tags(exact_match, tag="x")(make_sample("<x>42</x>")).value == 1.0
    assert isinstance(within_tags(exact_match, missing="unscored")(make_sample("42")), Unscored)


async def test_async_verifiers_are_awaited_within_tags(make_sample: Callable[..., Sample]) -> None:
    async def waiting(sample: Sample) -> float:
        return float(sample.response == "42")

    assert await within_tags(waiting)(make_sample("<answer>42</answer>")) == Score(1.0, {"tagged": 1.0})
    assert await within_tags(waiting)(make_sample("42")) == Score(0.0, {"tagged": 0.0})


async def test_made_verifiers_compose_under_their_names(make_sample: Callable[..., Sample]) -> None:
    reward = compose(regex_match(pattern=r"\d"), format_match(partial=True), weights={"regex_match": 2.0})
    result = await reward(make_sample(WELL))
    assert isinstance(result, Score)
    assert result.value == 3.0
