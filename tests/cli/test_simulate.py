"""`penstock simulate`: figures as a table, as JSON and as a picture; what makes no sense is refused by name."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.config.toml import write_toml
from penstock.rollout import plan
from penstock.simulate.outcome import Outcome
from penstock.simulate.picture import check_picture
from penstock.simulate.profiles import shipped, shipped_names
from penstock.simulate.world import simulate


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A shipped profile with few, short answers."""
    table = shipped("qwen3-8b").model_dump()
    table["prompts"] = 12
    table["lengths"] |= {"median_tokens": 200.0, "max_tokens": 800}
    path = tmp_path / "small.toml"
    path.write_text(write_toml(table))
    return str(path)


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    assert cli.main(["simulate", *words, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return found


def test_the_table_compares_all_strategies(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", small, "--machines", "2", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:]] == ["colocated", "disaggregated", "rlboost", "penstock"]
    found = {row["strategy"]: row for row in rows(capsys, small, "--machines", "2", "--steps", "2")}
    for line in lines[1:]:
        row = found[line.split()[1]]
        for words in (
            f"{row['tokens_per_s']:,.0f}",
            f"{row['dollars']:,.2f} $",
            f"{row['trainer_wait_share']:.1%}",
            f"{row['remote_wait_share']:.1%}",
            f"{row['regret']:+.1%}",
        ):
            assert words in line


def test_a_sweep_makes_every_combination_and_each_changes_the_figures(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--grid", "machines=1,3", "--grid", "lengths.median_tokens=100,400"]
    found = rows(capsys, small, "--steps", "2", "--strategies", "penstock", *grid)
    assert len({row["setting"] for row in found}) == 4
    assert len({row["dollars"] for row in found}) == 4


def test_each_run_of_a_sweep_names_its_setting_and_seed(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "1", "--strategies", "colocated,rlboost", "--grid", "machines=1,3", "--seed", "7"]
    assert cli.main(["simulate", small, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["setting"], run["strategy"], run["seed"]) for run in found["runs"]] == [
        ("machines=1", "colocated", 7),
        ("machines=1", "rlboost", 7),
        ("machines=3", "colocated", 7),
        ("machines=3", "rlboost", 7),
    ]
    for row, run in zip(found["rows"], found["runs"], strict=True):
        assert row["steps"] == len(run["steps"])
        assert row["step_s"] == pytest.approx(run["steps"][0]["step_s"])


@pytest.fixture
def plenty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A trace with more machines than anybody asks for, and few steps on it, planned in a hurry."""
    monkeypatch.setattr(plan, "TRIES", 3)
    monkeypatch.setattr(plan, "CHANCES", 1)
    path = tmp_path / "plenty.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": [40] * 20}))
    return ["--trace", str(path), "--steps", "4"]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> list[int]:
    """What the one strategy asked for, step by step."""
    assert cli.main(["simulate", *words, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["runs"][0]
    return [step["wanted"] for step in run["steps"]]


def test_how_many_machines_to_ask_for_is_answered_with_its_cause(
    small: str, plenty: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table the mean and the last number, in JSON each step's, though only two are ever there."""
    scarce = [*plenty, "--strategies", "rlboost,penstock", "--sample", "0.05"]
    assert cli.main(["simulate", small, *scarce, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["simulate", small, *scarce]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row, run, line in zip(found["rows"], found["runs"], lines[1:], strict=True):
        steps = run["steps"]
        walls = [step["step_s"] for step in steps]
        assert steps[0]["wanted"] == 4 > row["mean_fleet"], "asked for, and not there"
        assert steps[0]["wanted_cause"] == "nothing is known yet" != steps[-1]["wanted_cause"]
        mean = sum(step["wanted"] * wall for step, wall in zip(steps, walls)) / sum(walls)
        assert row["mean_asked"] == pytest.approx(mean)
        assert f"{mean:.1f}, last {row['last_asked']} " in line or f" {row['last_asked']} " in line
    assert "asked for" in lines[0]


def test_each_bound_on_the_number_is_kept(small: str, plenty: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [small, *plenty, "--strategies", "penstock"]
    free = asked(capsys, *words)
    assert 0 < free[-1] < 8
    assert min(asked(capsys, *words, "--floor", "8")) >= 8
    assert max(asked(capsys, *words, "--ceiling", "1")) == 1
    assert max(asked(capsys, *words, "--machines", "1")) == 1
    assert max(asked(capsys, *words, "--budget-per-h", "11")) == 2, "at 5.32 dollars each"
    assert asked(capsys, *words, "--hour-worth", "5000")[-1] > free[-1]


def test_the_table_says_what_baselines_were_tuned_to(
    small: str, plenty: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [small, *plenty, "--machines", "3", "--strategies", "colocated,disaggregated,rlboost"]
    assert cli.main(["simulate", *words]) == 0
    head, colocated, disaggregated, rlboost = capsys.readouterr().out.splitlines()
    assert head.endswith("tuned")
    assert colocated.endswith("%")
    found = re.search(r" (\d)  +(\d)\.0 .* (\d) on demand$", disaggregated)
    assert found
    assert found[1] == found[2] == found[3] <= "3", "the ceiling is the disaggregated ones', too"
    assert re.search(r"first window \d+(\.\d+)? s$", rlboost)


def test_without_a_trace_a_ceiling_says_how_many_there_are_and_strategies_choose(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [small, "--steps", "4", "--strategies", "rlboost"]
    (row,) = rows(capsys, *words, "--ceiling", "20")
    # Its number follows each step's times: another one than at first, and not the ceiling.
    assert 4 < row["mean_asked"] < 20
    assert row["last_asked"] not in (4, 20)
    assert row["mean_fleet"] >= 4


def test_a_policy_of_the_user_s_own_is_simulated_by_its_import_path(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policies_of_mine.py").write_text(
        "from penstock.rollout.balance import ShortestQueue\n\n\n"
        "class OneAtATime(ShortestQueue):\n"
        "    def room(self, load):\n"
        "        return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    words = [small, "--machines", "2", "--steps", "2", "--strategies", "penstock,policies_of_mine:OneAtATime"]
    ours, mine = rows(capsys, *words)
    assert mine["strategy"] == "policies_of_mine:OneAtATime"
    assert mine["step_s"] > 2 * ours["step_s"]


def test_a_policy_sees_in_the_simulator_what_it_sees_in_a_run(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens a second as an instance reported last, and whose it is: the example on the page goes by the former."""
    (tmp_path / "policies_that_look.py").write_text(
        "from penstock.rollout.balance import ShortestQueue\n\nSEEN = {}\n\n\n"
        "class Looks(ShortestQueue):\n"
        "    def weight(self, load):\n"
        "        SEEN.setdefault(load.reserved, set()).add(load.tokens_per_s)\n"
        "        return load.tokens_per_s or load.max_running\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows(capsys, small, "--machines", "2", "--steps", "2", "--strategies", "policies_that_look:Looks")
    seen: dict[bool, set[float]] = importlib.import_module("policies_that_look").SEEN
    assert set(seen) == {True, False}
    assert all(min(rates) == 0 and max(rates) > 0 for rates in seen.values()), "none before the first report"


def test_a_price_changes_dollars_and_not_seconds_where_the_fleet_is_fixed(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [small, "--machines", "2", "--steps", "2", "--strategies", "rlboost", "--grid", "prices.spot=1,9"]
    cheap, dear = rows(capsys, *words)
    assert cheap["dollars"] < dear["dollars"]
    assert cheap["step_s"] == dear["step_s"]


def test_a_trace_a_start_a_share_and_a_seed_each_change_the_run(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"metadata": {"gap_seconds": 30}, "data": [4, 2, 5, 1] * 20 + [8] * 200}))
    base = [small, "--trace", str(trace), "--steps", "4", "--strategies", "rlboost"]
    variants = [[], ["--sample", "0.3"], ["--start-h", "0.7"], ["--seed", "5"], ["--machines", "1"]]
    walls = {rows(capsys, *base, *variant)[0]["dollars"] for variant in variants}
    assert len(walls) == len(variants)


def test_hours_bound_a_run_without_steps(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [small, "--machines", "1", "--strategies", "colocated"]
    short, long = (rows(capsys, *words, "--hours", hours)[0]["steps"] for hours in ("0.05", "0.2"))
    assert 0 < short < long


def test_the_picture_has_every_strategy_over_the_trace_and_the_last_one_s_middle_step(
    small: str, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.svg"
    words = [small, "--machines", "2", "--steps", "3", "--strategies", "rlboost,penstock"]
    assert cli.main(["simulate", *words, "--picture", str(path)]) == 0
    text = re.sub(r"<!--\s*(.*?)\s*-->", r"\1", path.read_text())
    assert "penstock, step 1:" in text
    for word in ("rlboost", "reserved3", "node0", "node1", "trainer", "instances", "no policy ends sooner"):
        assert word in text, word


def test_the_picture_is_drawn(small: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    assert cli.main(["simulate", small, "--machines", "2", "--steps", "3", "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_can_t_be_written_is_refused_before_anything_is_simulated(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("penstock.simulate.world.simulate", lambda *_, **__: pytest.fail("simulated"))
    (tmp_path / "run.png").mkdir()
    assert cli.main(["simulate", small, "--machines", "1", "--picture", str(tmp_path / "run.png")]) == 2
    assert "run.png: can't be written: Is a directory" in capsys.readouterr().err


def test_trying_the_picture_s_path_leaves_everything_as_it_was(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    there, fresh = tmp_path / "there.png", tmp_path / "fresh.png"
    there.write_bytes(b"an older picture")
    check_picture(there)
    check_picture(fresh)
    assert there.read_bytes() == b"an older picture"
    assert not fresh.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "1"], "--trace FILE, or --machines N"),
        (["--trace", "gone.csv", "--sample", "2"], "--sample is 2.0"),
        (["--machines", "1", "--sample", "0.5"], "give --trace FILE"),
        (["--machines", "1", "--ceiling", "2"], "--machines and --ceiling both"),
        (["--ceiling", "2", "--grid", "machines=1,2"], "--machines and --ceiling both"),
        (["--machines", "4", "--grid", "machines=3,5"], "--machines and --grid machines=... both"),
        (["--machines", "4", "--floor", "2"], "--machines fixes it"),
        (["--machines", "4", "--budget-per-h", "9"], "--machines fixes it"),
        (["--machines", "4", "--hour-worth", "9"], "--machines fixes it"),
        (["--ceiling", "4", "--floor", "5"], "--floor is 5; it must be between 0 and 4"),
        (["--ceiling", "4", "--budget-per-h", "-5"], "--budget-per-h is -5"),
        (["--machines", "1", "--prices", "1,2,3"], "--prices is for"),
        (["--machines", "1", "--out", "x.toml"], "--out is for"),
        (["--machines", "1", "--picture", "gone/run.png"], "there is no folder gone"),
        (["--machines", "1", "--picture", "run.txt"], "ends in .png"),
        (["--grid", "machines=-1,2"], "-1 is no number of machines"),
        (["--grid", "machines=1.5"], "1.5 is no number of machines"),
        (["--machines", "1", "--strategies", "best"], "no strategy 'best'"),
        (["--machines", "1", "--strategies", "no.such:Policy"], "no balance policy at 'no.such:Policy'"),
        (["--machines", "1", "--grid", "prices.spot"], "write key=number"),
        (["--machines", "1", "--grid", "prices.spot=1,2", "--grid", "prices.spot=3"], "prices.spot is swept already"),
        (["--machines", "1", "--grid", "prices.gold=1"], "no such number"),
        (["--machines", "1", "--grid", "prices.spot=-1"], "prices.spot"),
        (["--trace", "gone.csv"], "gone.csv"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "qwen3-8b", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("1000,add,a\nbroken\n", ":2: 'broken' is no line"),
        ("-5,add,a\n", "a time from 0 on"),
        ("5,add,\n", "a time from 0 on and a name"),
        ("2026-11-22, 10:00:00, -1\n", ":1:"),
        ('{"metadata": {"gap_seconds": -5}, "data": [1, 2]}', "gap_seconds -5"),
        ('{"metadata": {"gap_seconds": 1e999}, "data": [1, 2]}', "gap_seconds inf"),
        ('{"metadata": {"gap_seconds": 600}, "data": []}', "has 0"),
        ('{"metadata": {"gap_seconds": 600}, "data": [1, -2]}', "least -2"),
    ],
)
def test_a_broken_trace_is_refused_by_its_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert cli.main(["simulate", "qwen3-8b", "--trace", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_a_stop_shows_what_was_simulated(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def until_stopped(*args: Any, **kwargs: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(simulate(*args, **kwargs))
        return done[-1]

    words = ["--steps", "2", "--grid", "machines=1,2", "--strategies", "colocated,penstock"]
    monkeypatch.setattr("penstock.simulate.world.simulate", until_stopped)
    assert cli.main(["simulate", small, *words]) == 130
    said = capsys.readouterr()
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["machines=1", "colocated"],
        ["machines=1", "penstock"],
        ["machines=2", "colocated"],
    ]
    assert "stopped" in said.err


def test_sigterm_shows_what_was_simulated(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done: list[Outcome] = []

    def until_stopped(*args: Any, **kwargs: Any) -> Outcome:
        if done:
            os.kill(os.getpid(), signal.SIGTERM)
        done.append(simulate(*args, **kwargs))
        return done[-1]

    monkeypatch.setattr("penstock.simulate.world.simulate", until_stopped)
    words = ["--machines", "1", "--steps", "1", "--strategies", "colocated,penstock"]
    # Were it not caught, it would end the tests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert cli.main(["simulate", small, *words]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == ["colocated"]
    assert "stopped" in said.err


def test_what_is_being_simulated_is_told_on_stderr_wherever_that_goes(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "1", "--grid", "machines=1,2", "--strategies", "colocated,disaggregated", "--json"]
    assert cli.main(["simulate", small, *words]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"]
    assert said.err.splitlines() == [
        f"{count} of 2, machines={count}: {name}" for count in (1, 2) for name in ("colocated", "disaggregated")
    ]


@pytest.mark.parametrize(("runs", "drawn"), [(1, "1 colocated"), (2, "2 colocated penstock"), (3, "1 colocated")])
def test_a_stop_draws_the_last_setting_of_which_anything_is_done(
    runs: int, drawn: str, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    left = [simulate] * runs

    def until_stopped(*args: Any, **kwargs: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        return left.pop()(*args, **kwargs)

    found: list[str] = []
    monkeypatch.setattr("penstock.simulate.world.simulate", until_stopped)
    monkeypatch.setattr(
        "penstock.simulate.picture.draw_run",
        lambda path, outcomes, *_: found.append(" ".join([f"{len(outcomes)}", *(one.strategy for one in outcomes)])),
    )
    words = ["--steps", "1", "--grid", "machines=1,2", "--strategies", "colocated,penstock"]
    assert cli.main(["simulate", small, *words, "--picture", str(tmp_path / "run.png")]) == 130
    assert found == [drawn]


@pytest.mark.parametrize(
    ("method", "answer", "says"),
    [
        ("assign", "[999]", "odd_policies:Odd makes no sense: assign picked instance 999"),
        ("assign", "None", "odd_policies:Odd makes no sense: assign gave None"),
        ("moves", "placed('nobody')", "odd_policies:Odd makes no sense: moves asked for the samples of 'nobody'"),
        (
            "moves",
            "1 / 0",
            "odd_policies:Odd failed in moves: ZeroDivisionError: division by zero (odd_policies.py, line",
        ),
        ("weight", "'x'", "odd_policies:Odd makes no sense: Odd.weight gave ['x'"),
        ("report", "1 / 0", "odd_policies:Odd failed in report"),
        ("finished", "1 / 0", "odd_policies:Odd failed in finished"),
        ("batch_ended", "1 / 0", "odd_policies:Odd failed in batch_ended"),
    ],
)
def test_a_policy_that_fails_is_told_in_one_line_and_the_rows_before_it_are_kept(
    method: str,
    answer: str,
    says: str,
    small: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "odd_policies.py").write_text(
        "from penstock.rollout.balance import ShortestQueue\n\n\n"
        "class Odd(ShortestQueue):\n"
        f"    def {method}(self, *told):\n"
        "        waiting, loads, placed = (*told, None, None, None)[:3]\n"
        f"        return {answer}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_policies", raising=False)
    words = ["--machines", "2", "--steps", "1", "--strategies", "rlboost,odd_policies:Odd"]
    assert cli.main(["simulate", small, *words]) == 1
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == ["rlboost"]
    assert says in said.err
    assert [line for line in said.err.splitlines() if not line.startswith("1 of 1, ")] == [
        line for line in said.err.splitlines() if line.startswith("penstock: error: ")
    ]


def test_a_run_that_can_t_go_on_ends_in_words(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    nobody = ["--machines", "0", "--grid", "reserved_instances=0", "--strategies", "rlboost"]
    for limit in (["--steps", "1"], ["--hours", "3"]):
        assert cli.main(["simulate", small, *nobody, *limit]) == 1
        said = capsys.readouterr()
        why = r"note: rlboost on reserved_instances=0: step 0 can't end: no token was drawn for (36\d\d) s, until \1 s;"
        assert re.search(why, said.err)
        assert "penstock: error: no strategy ended a step" in said.err
        assert said.out.splitlines()[1].endswith("no step ended")


def test_a_strategy_that_can_t_end_a_step_says_so_in_its_row_and_the_others_are_simulated(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without reserved engines colocated has nobody to generate."""
    words = [small, "--machines", "2", "--grid", "reserved_instances=0", "--steps", "1"]
    picture = tmp_path / "run.svg"
    assert cli.main(["simulate", *words, "--picture", str(picture)]) == 0
    said = capsys.readouterr()
    head, colocated, *others = said.out.splitlines()
    assert colocated.split()[:4] == ["reserved_instances=0", "colocated", "0", "-"]
    assert colocated.endswith("no step ended")
    assert [line.split()[1] for line in others] == ["disaggregated", "rlboost", "penstock"]
    column = head.split().index("x")
    assert others[0].split()[column + 1] == "1.00", "ratios go by the first that has figures"
    assert "note: colocated on reserved_instances=0: step 0 can't end" in said.err
    assert "penstock: error" not in said.err
    assert picture.exists()
    assert cli.main(["simulate", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    none, *rest = found["rows"]
    assert set(none) == set(rest[0])
    assert (none["strategy"], none["steps"], none["step_s"], none["dollars"]) == ("colocated", 0, None, None)
    assert none["stuck"].startswith("step 0 can't end")
    assert [(row["strategy"], row["stuck"]) for row in rest] == [(run["strategy"], "") for run in found["runs"]]


def test_steps_that_ended_count_where_so_many_were_asked_for_and_not_all_could(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n400000,remove,a\n400000,remove,b\n")
    words = ["--trace", str(path), "--grid", "reserved_instances=0", "--strategies", "rlboost", "--steps", "50"]
    (row,) = rows(capsys, small, *words)
    assert 0 < row["steps"] < 50
    assert row["stuck"].startswith(f"step {row['steps']} can't end")


def test_a_link_over_which_no_pull_ends_is_told_in_days(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--machines", "2", "--steps", "1", "--strategies", "rlboost,penstock", "--grid", "spot.link_gbit_s=1e-9"]
    assert cli.main(["simulate", small, *words]) == 0, "reserved engines do the work"
    assert "note" not in capsys.readouterr().err
    assert cli.main(["simulate", small, *words, "--grid", "reserved_instances=0"]) == 1
    said = capsys.readouterr().err
    for name in ("rlboost", "penstock"):
        assert re.search(rf"note: {name} on .* can't end: .*; there are 2 .*, and a pull of the weights takes 1,", said)


def test_steps_that_ended_before_the_last_machine_left_are_shown_with_why_there_are_no_more(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n400000,remove,a\n400000,remove,b\n14400000,add,c\n")
    words = ["--trace", str(path), "--grid", "reserved_instances=0", "--strategies", "rlboost", "--hours", "3"]
    assert cli.main(["simulate", small, *words]) == 0
    said = capsys.readouterr()
    assert [line.split()[1] for line in said.out.splitlines()[1:]] == ["rlboost"]
    assert re.search(r"note: rlboost on reserved_instances=0: step \d+ can't end", said.err)


def test_hours_hold_where_no_step_ends_in_them(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Outcome] = []

    def simulated(*args: Any, **kwargs: Any) -> Outcome:
        runs.append(simulate(*args, **kwargs))
        return runs[-1]

    monkeypatch.setattr("penstock.simulate.world.simulate", simulated)
    words = ["--machines", "0", "--strategies", "colocated", "--hours", "0.01", "--grid", "lengths.max_tokens=32000"]
    assert cli.main(["simulate", small, *words, "--grid", "lengths.median_tokens=16000"]) == 1
    assert [run.end_s for run in runs] == pytest.approx([36.0], abs=1.0)
    assert f"its first one had {runs[0].left_over} by then" in capsys.readouterr().err


def test_a_step_that_needs_more_hours_is_told_and_the_other_strategies_are_simulated(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--machines", "8", "--hours", "0.02", "--strategies", "colocated,disaggregated"]
    assert cli.main(["simulate", small, *words, "--grid", "reserved.step_base_s=1"]) == 0
    said = capsys.readouterr()
    assert [line.split()[2] == "0" for line in said.out.splitlines()[1:]] == [True, False]
    assert "no step ended within --hours 0.02; its first one had" in said.err


def test_without_prices_there_is_no_cost(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    free = [f"--grid=prices.{name}=0" for name in ("reserved", "spot", "on_demand")]
    assert cli.main(["simulate", small, "--machines", "1", "--steps", "2", *free]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert rows
    assert all(" - " in row for row in rows)


def test_a_trace_that_is_shorter_than_what_is_asked_is_told(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n60000,add,b\n")
    assert cli.main(["simulate", small, "--trace", str(path), "--hours", "0.02", "--strategies", "rlboost"]) == 0
    assert "the trace ends after 0.017 hours" in capsys.readouterr().err


@pytest.mark.parametrize("last", ["60000,add,b", "60000,remove,a"])
def test_machines_stay_as_the_last_line_of_a_trace_leaves_them(
    last: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"0,add,a\n{last}\n")
    words = [small, "--trace", str(path), "--strategies", "rlboost", "--hours", "0.3", "--json"]
    assert cli.main(["simulate", *words]) == 0
    steps = json.loads(capsys.readouterr().out)["runs"][0]["steps"]
    assert steps[0]["fleet"] == 1.0
    assert steps[-1]["fleet"] == (2.0 if "add" in last else 0.0)


def test_a_trace_of_one_moment_is_a_fleet_that_stays(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n0,add,b\n")
    (row,) = rows(capsys, small, "--trace", str(path), "--steps", "2", "--strategies", "rlboost")
    assert row["mean_fleet"] == 2.0


def test_a_start_behind_the_end_of_a_trace_is_refused(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,add,a\n3600000,add,b\n")
    assert cli.main(["simulate", small, "--trace", str(path), "--start-h", "1.5"]) == 2
    assert "--start-h 1.5: the trace ends after 1.0 hours" in capsys.readouterr().err


def test_a_profile_with_a_wrong_key_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('name = "odd"\nweight_gb = 3\n')
    assert cli.main(["simulate", str(path), "--machines", "1"]) == 2
    told = capsys.readouterr().err
    assert "weight_gb" in told
    assert "reserved_instances" in told


def test_three_profiles_are_shipped() -> None:
    assert shipped_names() == ["qwen3-14b", "qwen3-32b", "qwen3-8b"]
    for name in shipped_names():
        assert shipped(name).name == name
