from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from penstock import cli
from penstock.bench import common
from penstock.bench.common import Result, at_least, at_most, discover, json_line, median, skipped, table
from penstock.errors import ConfigError

RESULTS = [
    at_least("tokens", 1_234_567.0, 500_000, "tokens/s"),
    at_most("memory", 20.5, 16, "B/token", note="with allocator"),
    Result("plain", 0.00012, "s"),
    skipped("vLLM", "x", "PENSTOCK_VLLM_PYTHON is not set", target=">= 0.9"),
]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A benchmark called `fake`; the list gets what `quick` was."""
    asked: list[bool] = []
    module = types.ModuleType("penstock.bench.fake")

    def run(quick: bool) -> list[Result]:
        asked.append(quick)
        return RESULTS

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.bench.fake", module)
    monkeypatch.setattr(common, "discover", lambda: {"fake": "measures nothing"})
    return asked


def test_the_table_shows_every_figure_with_its_target_and_note() -> None:
    lines = table("fake", RESULTS).splitlines()
    assert lines[0] == "fake"
    assert lines[1].split() == ["value", "unit", "target", "met"]
    assert lines[2].split() == ["tokens", "1,234,567", "tokens/s", ">=", "500,000", "yes"]
    assert lines[3].split() == ["memory", "20.5", "B/token", "<=", "16", "NO"]
    assert lines[4].split() == ["plain", "1.20e-04", "s", "-"]
    assert lines[5].split() == ["vLLM", "-", "x", ">=", "0.9", "-"]
    assert lines[6:] == ["  memory: with allocator", "  vLLM: skipped: PENSTOCK_VLLM_PYTHON is not set"]


def test_the_json_line_has_the_agreed_shape() -> None:
    found = json.loads(json_line("fake", RESULTS, {"cpu": "x"}))
    assert list(found) == ["bench", "machine", "results"]
    assert list(found["results"][0]) == ["what", "value", "unit", "target", "met", "note"]
    assert [row["met"] for row in found["results"]] == [True, False, None, None]
    assert found["results"][3]["value"] is None


def test_the_machine_is_described() -> None:
    found = common.machine()
    assert found["cores"] >= 1
    assert found["memory_gib"] > 0
    assert found["python"]


def test_a_benchmark_is_run_and_drawn_and_json_comes_last(
    benchmark: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "fake", "--quick", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert benchmark == [True]
    assert lines[0] == "fake"
    assert json.loads(lines[-1])["bench"] == "fake"


def test_a_missed_target_is_a_failure_only_if_strict(benchmark: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fake"]) == 0
    assert cli.main(["bench", "fake", "--strict"]) == 1
    assert benchmark == [False, False]
    capsys.readouterr()


def test_on_a_terminal_the_table_has_colour(
    benchmark: list[bool], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["bench", "fake"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[" in out
    assert "1,234,567" in out
    assert "skipped: PENSTOCK_VLLM_PYTHON is not set" in out


def test_listing_imports_no_benchmark() -> None:
    script = (
        "import sys; from penstock.cli import main; main(['bench']);"
        "print([n for n in sys.modules if n.startswith('penstock.bench.') and n != 'penstock.bench.common'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[-1] == "[]"
    assert [line.split()[0] for line in lines[:-1]] == list(discover())


def test_every_benchmark_keeps_the_agreement() -> None:
    for name in discover():
        module = common.load(name)
        assert callable(module.run)
        assert discover()[name] == module.DESCRIPTION


def test_an_unknown_benchmark_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no benchmark 'x'; there are: "):
        common.load("x")


def test_a_benchmark_is_named_with_dashes_and_its_module_is_understood_too() -> None:
    assert "reward-sockets" in discover()
    assert common.load("reward-sockets") is common.load("reward_sockets")


def test_a_figure_without_value_must_say_why() -> None:
    with pytest.raises(ValueError, match="no note that says why"):
        Result("a", None, "s")
    with pytest.raises(ValueError, match="can't be measured is None"):
        Result("a", float("nan"), "s")


def test_the_median_of_nothing_is_refused() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="no repetitions"):
        median([])


@pytest.fixture
def parted(benchmark: list[bool]) -> list[str]:
    """The benchmark `fake` with two parts; the list gets those that were run."""
    ran: list[str] = []
    module = sys.modules["penstock.bench.fake"]

    def run_part(part: str, quick: bool) -> list[Result]:
        ran.append(part)
        return [Result(f"of {part}", 1.0, "s")]

    module.PARTS, module.run_part = ("long", "longer"), run_part  # type: ignore[attr-defined]
    return ran


def test_a_part_is_run_alone_and_what_is_kept_is_not_run_again(
    parted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.jsonl")
    assert cli.main(["bench", "fake", "--only", "longer", "--keep", kept]) == 0
    assert parted == ["longer"]
    assert "of longer" in capsys.readouterr().out
    assert cli.main(["bench", "fake", "--keep", kept]) == 0
    assert parted == ["longer", "long"]
    shown = capsys.readouterr()
    assert shown.out.index("of long ") < shown.out.index("of longer")
    assert "longer: kept in" in shown.err
    assert cli.main(["bench", "fake", "--keep", kept, "--quick"]) == 0
    assert parted == ["longer", "long", "long", "longer"]


def test_parts_and_files_that_are_none_are_refused(parted: list[str], tmp_path: Path) -> None:
    fake = common.load("fake")
    with pytest.raises(ConfigError, match="has no part 'x'; there are: long, longer"):
        common.run_parts("fake", fake, False, ["x"])
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{}\n")
    with pytest.raises(ConfigError, match="not a file of kept results"):
        common.run_parts("fake", fake, False, [], broken)
    with pytest.raises(ConfigError, match="can't be written"):
        common.run_parts("fake", fake, False, [], tmp_path / "none" / "kept.jsonl")
    assert parted == ["long"]


def test_a_benchmark_without_parts_takes_none(benchmark: list[bool]) -> None:
    with pytest.raises(ConfigError, match="has no parts"):
        common.run_parts("fake", common.load("fake"), False, ["long"])
