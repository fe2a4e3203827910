from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from penstock.errors import MissingExtra, RewardError
from penstock.reward import Sample, Score, Scorer, Unscored
from penstock.reward.verifiers import math_answer

PATH = "penstock.reward.verifiers:math_answer"


@pytest.mark.parametrize(
    ("answer", "response", "value"),
    [
        ("1/2", r"so it is $\boxed{\frac{1}{2}}$", 1.0),
        (r"\frac{1}{2}", "the answer is 0.5", 1.0),
        (r"$\frac12$", r"\boxed{0.5}", 1.0),
        (42, "6 times 7 is 42.", 1.0),
        ("Natalia sold 72.\n#### 72", r"\boxed{72}", 1.0),
        ("{1,2}", r"\boxed{\{2,1\}}", 1.0),
        ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
        ("42", r"\boxed{43}", 0.0),
        ("1/3", r"\boxed{0.333}", 0.0),
    ],
)
def test_answers_are_compared_by_what_they_mean(
    make_sample: Callable[..., Sample], answer: object, response: str, value: float
) -> None:
    assert math_answer()(make_sample(response, answer=answer)) == Score(value, {"parsed": 1.0})


def test_an_answer_that_cannot_be_read_is_wrong_and_the_part_says_so(make_sample: Callable[..., Sample]) -> None:
    assert math_answer()(make_sample("I do not know.", answer="42")) == Score(0.0, {"parsed": 0.0})
    assert math_answer()(make_sample("", answer="42")) == Score(0.0, {"parsed": 0.0})


@pytest.mark.parametrize("row", [{"answer": ""}, {"answer": None}, {"answer": [1]}, {"answer": True}, {"other": 1}])
def test_a_row_whose_answer_cannot_be_read_leaves_the_sample_unscored(
    make_sample: Callable[..., Sample], row: dict[str, object]
) -> None:
    result = math_answer()(make_sample("42", **row))
    assert isinstance(result, Unscored)
    assert "questions.jsonl:8" in result.cause


def test_options_choose_the_field_and_the_decimals(make_sample: Callable[..., Sample]) -> None:
    assert math_answer(field="gold")(make_sample("7", gold=7)).value == 1.0
    assert math_answer(decimals=2)(make_sample("0.333", answer="0.3333")).value == 1.0
    assert math_answer(decimals=4)(make_sample("0.333", answer="0.3333")).value == 0.0
    with pytest.raises(RewardError, match="decimals"):
        math_answer(decimals=-1)


def test_it_works_outside_the_main_thread_where_sigalrm_does_not(make_sample: Callable[..., Sample]) -> None:
    verify, results = math_answer(), []
    thread = threading.Thread(target=lambda: results.append(verify(make_sample(r"\boxed{0.5}", answer="1/2"))))
    thread.start()
    thread.join()
    assert results == [Score(1.0, {"parsed": 1.0})]


async def test_a_comparison_that_never_ends_is_killed_and_the_next_is_scored(
    make_sample: Callable[..., Sample],
) -> None:
    scorer = Scorer(PATH, mode="process", processes=1, timeout_s=4)
    await scorer.start()
    result = await scorer.score(make_sample(r"\boxed{100000000!}", answer="5"))
    assert isinstance(result, Unscored)
    assert "killed" in result.cause
    assert await scorer.score(make_sample("42", answer="42")) == Score(1.0, {"parsed": 1.0})
    await scorer.close()


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtra, match=r"penstock\[math\]"):
        math_answer()
