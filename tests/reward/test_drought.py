from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.reward.drought import FIRST_SCORE_WITHIN, MOST_IN_A_ROW, Drought
from penstock.sample import Score, Unscored


def test_a_function_that_never_scored_has_so_many_samples_and_no_more() -> None:
    drought = Drought()
    for number in range(FIRST_SCORE_WITHIN):
        assert drought.verdict == ""
        drought.take(Unscored(f"cause {number}"))
    assert drought.verdict == "none of the first 256 samples could be scored; the last one's cause: cause 255"


def test_one_that_has_scored_is_given_longer() -> None:
    drought = Drought()
    drought.take(Score(0.0))
    for _ in range(MOST_IN_A_ROW):
        assert drought.verdict == ""
        drought.take(Unscored("the judge is away"))
    assert drought.verdict.startswith("none of the last 1024 samples could be scored")


@given(st.lists(st.integers(0, FIRST_SCORE_WITHIN - 1), max_size=20))
def test_a_score_now_and_then_is_enough(gaps: list[int]) -> None:
    drought = Drought()
    for gap in gaps:
        for _ in range(gap):
            drought.take(Unscored("no answer"))
        assert drought.verdict == ""
        drought.take(Score(1.0))
    assert drought.in_a_row == 0
