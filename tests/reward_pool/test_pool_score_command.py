"""`penstock reward score`: a file in, a file out, and where it stopped it goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli import reward as reward_command
from penstock.cli.reward import summary_of

REWARD = """
calls = open({log!r}, "a")

def reward(sample):
    print(sample.row["n"], file=calls, flush=True)
    if sample.row["n"] == 3:
        raise ValueError("bad answer")
    return float(sample.response == sample.row["answer"])
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "reward.py").write_text(REWARD.format(log=str(tmp_path / "calls")))
    rows = [{"response": str(n % 2), "answer": "1", "n": n, "prompt": "?"} for n in range(6)]
    (tmp_path / "answers.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return tmp_path


def score(files: Path, *more: str) -> int:
    return main(["reward", "score", str(files / "answers.jsonl"), "--function", f"{files / 'reward.py'}:reward", *more])


def results(files: Path) -> dict[int, dict]:
    lines = (files / "answers.scored.jsonl").read_text().splitlines()
    return {result["line"]: result for result in map(json.loads, lines)}


def test_every_line_gets_a_score_or_a_cause(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(files) == 0
    assert {n: result.get("score") for n, result in results(files).items()} == {
        1: 0.0,
        2: 1.0,
        3: 0.0,
        4: None,
        5: 0.0,
        6: 1.0,
    }
    assert results(files)[4]["unscored"] == "ValueError: bad answer (reward.py:7)"
    said = capsys.readouterr().out
    assert "5 of 6 scored, mean 0.4000" in said
    assert "1 unscored: ValueError: bad answer" in said


def test_a_run_that_was_cut_off_is_resumed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = files / "answers.scored.jsonl"
    out.write_text('{"line":1,"score":0.0,"parts":{}}\n{"line":2,"score":1.0,"parts":{}}\n{"line":3,"sc')
    assert score(files) == 0
    assert sorted((files / "calls").read_text().split()) == ["2", "3", "4", "5"]
    assert sorted(results(files)) == [1, 2, 3, 4, 5, 6]
    assert score(files) == 0
    assert sorted((files / "calls").read_text().split()) == ["2", "3", "4", "5"], "nothing is left to do"
    assert capsys.readouterr().out.count("5 of 6 scored, mean 0.4000") == 2


def test_processes_score_as_well(files: Path) -> None:
    assert score(files, "--mode", "process", "--processes", "1") == 0
    assert len(results(files)) == 6


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('\n[1]\n{"respo', "answers.jsonl:2: the line is not a JSON object"),
        ('{"answer": "a"}\n', "answers.jsonl:1: 'response' is None; it must be text"),
        ("\n", "holds no samples"),
    ],
)
def test_a_file_without_any_sample_is_refused_and_its_first_line_named(
    files: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (files / "answers.jsonl").write_text(text)
    assert score(files) == 1
    assert says in capsys.readouterr().err


def test_a_broken_line_costs_no_other_its_score(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (files / "answers.jsonl").read_text().splitlines()
    (files / "answers.jsonl").write_text("\n".join([whole[0], "[1]", '{"response": 5}', whole[1][:9], whole[4]]))
    for _ in range(2):
        assert score(files) == 0
        got = results(files)
        assert [got[n].get("score") for n in range(1, 6)] == [0.0, None, None, None, 0.0]
        assert got[2]["unscored"].startswith("the line is not a JSON object: Expected `object`, got `array`")
        assert got[3]["unscored"] == "'response' is 5; it must be text"
        assert "2 of 5 scored" in capsys.readouterr().out
    (files / "answers.jsonl").write_text("\n".join([whole[0], whole[1], '{"response": 5}', whole[2], whole[4]]))
    assert score(files, "--retry-unscored") == 0
    assert "4 of 5 scored" in capsys.readouterr().out, "what is mended is scored where it is asked for"


def test_other_files_are_not_written_over(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for notes in ("my notes\n", "my notes", '{"mine": 1}\n{"li'):
        (files / "notes").write_text(notes)
        assert score(files, "--out", str(files / "notes")) == 1
        assert "choose another file with --out" in capsys.readouterr().err
        assert (files / "notes").read_text() == notes
    assert score(files, "--out", str(files / "none" / "x")) == 1
    assert "can't be written" in capsys.readouterr().err


def test_a_function_that_scores_nothing_ends_the_command_with_its_cause(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"response": "1", "answer": "1", "n": 3, "prompt": "?"})
    (files / "answers.jsonl").write_text(f"{row}\n" * 300)
    assert score(files) != 0
    said = capsys.readouterr().err
    assert "none of the first 256 samples could be scored" in said
    assert "ValueError: bad answer (reward.py:7)" in said
    assert "ExceptionGroup" not in said


def test_it_says_what_it_knows_and_scores_the_unscored_again_where_told(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score(files) == 0
    calls = files / "calls"
    calls.write_text("")
    capsys.readouterr()
    assert score(files) == 0
    assert not calls.read_text()
    assert "6 of 6 known from" in capsys.readouterr().out
    (files / "mended.py").write_text("def reward(sample):\n    return sample.row['n'] / 10\n")
    assert score(files, "--retry-unscored", "--function", f"{files / 'mended.py'}:reward") == 0
    assert [results(files)[line]["score"] for line in (1, 2, 3, 4)] == [0.0, 1.0, 0.0, 0.3], "only the unscored one"
    said = capsys.readouterr().out
    assert "5 of 6 known from" in said
    assert "6 of 6 scored" in said


@pytest.mark.parametrize(
    ("option", "value"), [("--timeout-s", "-1"), ("--timeout-s", "nan"), ("--processes", "0"), ("--concurrency", "0")]
)
def test_an_impossible_number_is_refused_before_anything_starts(
    files: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert score(files, option, value) == 2
    assert f"argument {option}" in capsys.readouterr().err
    assert not (files / "answers.scored.jsonl").exists()


AT_ONCE = """
import asyncio

inside = 0

async def reward(sample):
    global inside
    inside += 1
    seen = inside
    try:
        await asyncio.sleep(60 if sample.row["n"] == 5 else 0.01)
    finally:
        inside -= 1
    return float(seen)
"""


def test_concurrency_and_time_limit_are_as_asked_for(files: Path) -> None:
    (files / "at_once.py").write_text(AT_ONCE)
    path = f"{files / 'at_once.py'}:reward"
    for concurrency, most in (("1", 1.0), ("3", 3.0)):
        out = files / f"out-{concurrency}"
        options = ("--function", path, "--timeout-s", "0.5", "--concurrency", concurrency, "--out", str(out))
        assert score(files, *options) == 0
        got = {result["line"]: result for result in map(json.loads, out.read_text().splitlines())}
        assert max(result["score"] for result in got.values() if "score" in result) == most
        assert "0.5" in got[6]["unscored"], "the one that hangs"


def test_a_log_has_a_line_now_and_then(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert score(files) == 0
    assert " done, " not in capsys.readouterr().err, "a short run needs none"
    monkeypatch.setattr(reward_command._Progress, "LINE_EVERY_S", 0.0)
    assert score(files, "--out", str(files / "again"), "--concurrency", "1") == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("2 of 6")] == ["2 of 6 done, 2 scored mean 0.500"]


def test_a_folder_is_no_place_for_results(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score(files, "--out", str(files)) == 1
    assert "can't be read: Is a directory" in capsys.readouterr().err


def test_the_summary_stays_short_however_many_causes_there_are() -> None:
    causes = Counter({"often": 5, "x" * 1000: 4, **{f"row {n}": 1 for n in range(50)}})
    lines = summary_of(causes)
    assert lines[0] == "  5 unscored: often"
    assert len(lines) == 11
    assert max(map(len, lines)) < 230
    assert lines[-1] == "  42 unscored, of 42 other causes: see the results"


def test_ctrl_c_says_where_the_results_are_and_blames_no_sample(files: Path) -> None:
    (files / "slow.py").write_text(
        "import asyncio\n\nasync def reward(sample):\n    print('begun', flush=True)\n    await asyncio.sleep(600)\n"
    )
    command = ["reward", "score", str(files / "answers.jsonl"), "--function", f"{files / 'slow.py'}:reward"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.startswith("interrupted; what is scored is in ")
    assert errors.count("\n") == 1, errors
