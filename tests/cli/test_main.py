from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import __version__, cli, collector
from penstock.config import RunConfig
from penstock.errors import ConfigError, PenstockError, StorageError

LEAST = 'model.path = "m"\n[[data.train]]\nkind = "jsonl"\npath = "a.jsonl"\n'
HEAVY = ("torch", "transformers", "numpy", "rich", "pydantic", "aiohttp", "msgspec", "matplotlib", "pyarrow")


def penstock(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def standing_in(monkeypatch: pytest.MonkeyPatch, main: Callable[..., int]) -> None:
    """Puts a command of the test's own in the place of `doctor`."""
    module = types.ModuleType("penstock.cli.doctor")
    module.HELP = "stand-in"  # type: ignore[attr-defined]
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.cli.doctor", module)


# ---- the command itself


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    script = f"""
        import sys
        from penstock.cli import main
        assert main(["--help"]) == 0
        print([name for name in {HEAVY!r} if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    for name in cli.COMMANDS:
        assert f"  {name} " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"penstock.cli.{name}")
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: penstock {name}" in out
    assert module.HELP.splitlines()[0][:40] in out


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "commands:"),
        (
            ["trian"],
            "no command 'trian'; there are: train, export, join, manager, reward, gateway, simulate, bench, doctor",
        ),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["doctor", "--jsn"], "unrecognized arguments: --jsn"),
        (["train", "a.toml", "--dry"], "unrecognized arguments: --dry"),
        (["train"], "penstock: error: name a TOML file"),
        (["train", "gone.toml"], "penstock: error: gone.toml: there is no such file"),
        (["bench", "nonsense"], "penstock: error: there is no benchmark 'nonsense'; there are: "),
    ],
)
def test_a_wrong_command_line_is_told_and_exits_with_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    caught = capsys.readouterr()
    assert told in caught.err
    assert caught.out == ""
    assert "Traceback" not in caught.err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("wrong"), 2), (StorageError("full"), 1), (PenstockError("x"), 1)]
)
def test_errors_for_people_have_no_traceback(
    error: PenstockError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    standing_in(monkeypatch, fail)
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err == f"penstock: error: {error}\n"


def test_a_traceback_comes_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(args: object) -> int:
        raise StorageError("full")

    standing_in(monkeypatch, fail)
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1")
    assert cli.main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("penstock: error: full\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(args: object) -> int:
        raise ZeroDivisionError

    standing_in(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_ctrl_c_exits_with_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
        return 0

    standing_in(monkeypatch, interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error() -> None:
    """`penstock train --help-config | head -1`, with a real pipe."""
    child = subprocess.Popen(
        [sys.executable, "-m", "penstock", "train", "--help-config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 141
    assert err == b""


# ---- train


def test_a_dry_run_prints_a_configuration_that_gives_itself(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(LEAST)
    first = penstock("train", "a.toml", "--train.lr", "1e-5", "--dry-run", "--seed=7", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "lr = 1e-05\n" in first.stdout
    (tmp_path / "b.toml").write_text(first.stdout)
    assert penstock("train", "b.toml", "--dry-run", cwd=tmp_path).stdout == first.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "b.toml"], "nothing was started"


def test_train_hands_files_overrides_and_resume_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(LEAST)
    seen: list[tuple[float, str | None, bool]] = []
    module = types.ModuleType("penstock.cli.run_local")

    def run(config: RunConfig, resume: str | None, *, eval_only: bool) -> int:
        seen.append((config.train.lr, resume, eval_only))
        return 5

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "penstock.cli.run_local", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/run-001/checkpoints/step-000001").mkdir(parents=True)
    assert cli.main(["train", "--train.lr=0.5", str(tmp_path / "a.toml"), "--resume", "latest"]) == 5
    assert cli.main(["train", str(tmp_path / "a.toml"), "--eval-only", "--train.lr=0.25", "--resume", "runs/a"]) == 5
    assert seen == [(0.5, "latest", False), (0.25, "runs/a", True)]


def test_the_configurations_help_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help-config"]) == 0
    assert "  train.lr\n" in capsys.readouterr().out


def test_all_that_is_wrong_is_told_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.toml").write_text(LEAST)
    assert cli.main(["train", str(tmp_path / "a.toml"), "--train.lr=0", "--train.lrr=1"]) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith("penstock: error: the configuration has 2 problems:\n")
    assert caught.out == ""


# ---- the garbage collector while a command starts


def test_a_process_of_ones_own_collects_seldom_until_it_has_begun_and_no_other_is_touched() -> None:
    found, frozen = gc.get_threshold(), gc.get_freeze_count()
    assert cli.main(["--version"]) == 0
    collector.settle()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (found, frozen)
    code = f"""
import gc
from penstock import collector
before = gc.get_threshold()
collector.spare()
assert gc.get_threshold() == collector.STARTING != before
collector.settle()
assert gc.get_threshold() == before == {found}
assert gc.get_freeze_count() > 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- doctor, as a person runs it


def test_the_doctor_tells_people_and_programs_the_same() -> None:
    done = penstock("doctor", "--json")
    found = json.loads(done.stdout)
    works = {verdict["what"]: verdict["works"] for verdict in found["verdicts"]}
    assert works["built-in engine on CPU"] is True
    assert done.returncode == (0 if works["quickstart"] else 1)
