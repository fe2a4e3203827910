"""Figures of a comparison by hand: two steps of one strategy, one of another, and each cell and key worked out."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.rollout.offload import StepTimes
from penstock.simulate.outcome import Asked, Outcome, StepOutcome
from penstock.simulate.report import Row, as_json, in_words, row_of, table


def step(
    number: int, began_s: float, times: StepTimes, paid_h: float, moves: int, bound_s: float, price: float = 3.0
) -> StepOutcome:
    causes = ((began_s, "planned"), (began_s + 1.0, "late"))
    waited_s, ready_s = times.fleet * times.remote_wait_s, times.fleet * times.step_s
    return StepOutcome(
        number,
        began_s,
        times,
        1_000_000,
        paid_h,
        36.0 * times.step_s / 3600 + price * paid_h,
        moves,
        lambda: bound_s,
        causes,
        remote_waited_s=waited_s,
        remote_ready_s=ready_s,
    )


def two_steps() -> Outcome:
    """100 s with one machine, then 300 s with three."""
    first = StepTimes(1.0, 100.0, 20.0, 60.0, 15.0, 5.0, preemptions=1)
    second = StepTimes(3.0, 300.0, 40.0, 200.0, 25.0, 55.0, preemptions=4)
    return Outcome(
        "penstock",
        "small",
        [step(0, 0.0, first, 0.5, 2, 80.0), step(1, 100.0, second, 1.5, 3, 200.0)],
        [Asked(2, "first guess"), Asked(4, "it pays"), Asked(5, "it pays more")],
        # What has not ended counts nowhere.
        end_s=1000.0,
    )


def one_step() -> Outcome:
    times = StepTimes(2.0, 800.0, 0.0, 60.0, 400.0, 8.0)
    return Outcome("disaggregated", "small", [step(0, 0.0, times, 0.4, 0, 800.0, price=10.0)], [Asked(2, "fixed")] * 2)


def test_a_row_adds_up_its_steps_by_their_length() -> None:
    row = row_of(two_steps(), "here")
    dollars = 36.0 * 400 / 3600 + 3.0 * 2.0
    assert dataclasses.asdict(row) == {
        "setting": "here",
        "strategy": "penstock",
        "steps": 2,
        "step_s": 200.0,
        "tokens_per_s": 5000.0,
        "tokens_per_dollar": pytest.approx(2e6 / dollars),
        "dollars": pytest.approx(dollars),
        "mean_asked": 3.5,
        "last_asked": 5,
        "mean_fleet": 2.5,
        "trainer_wait_share": 0.1,
        "remote_wait_share": (5.0 + 3 * 55.0) / (100.0 + 3 * 300.0),
        "regret": pytest.approx((100 / 80 + 300 / 200) / 2 - 1),
        "moves": 5,
        "preemptions": 5,
        "tuned": "",
        "stuck": "",
    }


def cells(rows: list[Row]) -> list[dict[str, str]]:
    """A table's lines, by head; heads and cells are two blanks apart."""
    head, *lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table(rows).splitlines()]
    return [dict(zip(head, line)) for line in lines]


def test_each_cell_has_its_figure_and_ratios_go_by_the_first_of_the_setting() -> None:
    base = row_of(one_step(), "a", tuned="2 on demand")
    ours = row_of(two_steps(), "a")
    elsewhere = row_of(two_steps(), "b")
    first, second, third = cells([base, ours, elsewhere])
    assert first == {
        "setting": "a",
        "strategy": "disaggregated",
        "steps": "1",
        "step": "800 s",
        "tokens/s": "1,250",
        "x": "1.00",
        "M tokens/$": "0.083",
        "$ x": "1.00",
        "cost": "12.00 $",
        "asked for": "2",
        "held": "2.0",
        "trainer waits": "50.0%",
        "remote wait": "1.0%",
        "regret": "+0.0%",
        "tuned": "2 on demand",
    }
    assert second == {
        "setting": "a",
        "strategy": "penstock",
        "steps": "2",
        "step": "200 s",
        "tokens/s": "5,000",
        "x": "4.00",
        "M tokens/$": "0.200",
        "$ x": "2.40",
        "cost": "10.00 $",
        "asked for": "3.5, last 5",
        "held": "2.5",
        "trainer waits": "10.0%",
        "remote wait": "17.0%",
        "regret": "+37.5%",
    }
    assert (third["x"], third["$ x"]) == ("1.00", "1.00")


def test_json_has_each_step_with_what_stood_in_it() -> None:
    outcome = two_steps()
    (run,) = as_json([row_of(outcome, "here")], [outcome], 7)["runs"]
    assert (run["setting"], run["strategy"], run["profile"], run["seed"]) == ("here", "penstock", "small", 7)
    assert run["steps"][1] == {
        "step": 1,
        "began_s": 100.0,
        "step_s": 300.0,
        "bound_s": 200.0,
        "window_s": 40.0,
        "train_s": 200.0,
        "trainer_wait_s": 25.0,
        "remote_waited_s": 165.0,
        "remote_ready_s": 900.0,
        "wanted": 4,
        "wanted_cause": "it pays",
        "fleet": 3.0,
        "tokens": 1_000_000,
        "moves": 3,
        "preemptions": 4,
        "window": [{"at_s": 100.0, "cause": "planned"}, {"at_s": 101.0, "cause": "late"}],
    }


def test_a_run_in_which_no_step_ended_has_no_figures() -> None:
    empty = Outcome("penstock", "small", asked=[Asked(2, "first guess")])
    with pytest.raises(ValueError, match="penstock on here: no step ended"):
        row_of(empty, "here")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"),
        (1.234, "1.23"),
        (0.02, "0.0200"),
        (47.66, "47.7"),
        (99.96, "100"),
        (812.4, "812"),
        (25_731.0, "25,731"),
    ],
)
def test_times_have_three_significant_digits(value: float, words: str) -> None:
    assert in_words(value) == words
    row = dataclasses.replace(row_of(two_steps(), "here"), step_s=value or 1.0)
    assert cells([row])[0]["step"] == (f"{words} s" if value else "1.00 s")


@pytest.mark.parametrize(("mean", "last", "words"), [(6.04, 6, "6"), (6.06, 6, "6.1, last 6"), (6.0, 7, "6.0, last 7")])
def test_a_last_number_is_told_where_it_is_printed_as_another(mean: float, last: int, words: str) -> None:
    row = dataclasses.replace(row_of(two_steps(), "here"), mean_asked=mean, last_asked=last)
    assert cells([row])[0]["asked for"] == words
