"""`penstock train`: a provisioner that can't be made is refused before anything is, and a dry run says so too."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from penstock import cli
from penstock.cli import run_local
from penstock.errors import PenstockError
from penstock.train.processes import LocalProcesses

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.toml")
OWN = """
class MyCloud:
    def __init__(self, join, *, region):
        raise RuntimeError("only a run may reach for machines")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "cloud_of_mine", raising=False)
    (tmp_path / "cloud_of_mine.py").write_text(OWN)
    (tmp_path / "plain.sh").write_text("#!/bin/sh\n")
    script = tmp_path / "fleet.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("how", [["--dry-run"], []])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["comand"], "fleet.provisioner='comand' can't be made: there is none of that name; it is one of local, comm"),
        (["cloud_of_mine:MyClod"], "can't be made: module 'cloud_of_mine' has no attribute 'MyClod'"),
        (["cloud_of_yours:MyCloud"], "can't be made: No module named 'cloud_of_yours'"),
        (["cloud_of_mine:MyCloud"], "can't be made: missing a required argument: 'region'"),
        (["cloud_of_mine:MyCloud", "--fleet.options.regin=a"], "can't be made with the options regin: "),
        (["command"], "missing 1 required keyword-only argument: 'command'"),
        (["command", "--fleet.options.command=./gone.sh add"], "fleet.options.command: ./gone.sh is not there"),
        (["command", "--fleet.options.command=./plain.sh"], "fleet.options.command: ./plain.sh is not executable"),
        (["command", "--fleet.options.command=no-such-program"], "fleet.options.command: no-such-program is not there"),
        (["local", "--fleet.options.argument=x"], "can't be made with the options argument: "),
    ],
)
def test_a_provisioner_that_can_t_be_made_is_refused_before_anything_is_started(
    how: list[str], words: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in here.iterdir() if path.name != "__pycache__")
    name, *options = words
    assert cli.main(["train", QUICKSTART, *how, f"--fleet.provisioner={name}", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("penstock: error: ")
    assert says in said.err
    assert len(said.err.splitlines()) == 1
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == before


def test_a_template_that_is_not_there_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("kubernetes")
    words = ["--fleet.provisioner=kubernetes", "--fleet.options.template=gone.yaml"]
    assert cli.main(["train", QUICKSTART, "--dry-run", *words]) == 2
    assert "the template gone.yaml can't be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["cloud_of_mine:MyCloud", "--fleet.options.region=there"],
        ["command", "--fleet.options.command=./fleet.sh --zone a"],
        ["command", "--fleet.options.command=sh -c true"],
        ["local"],
        ["none"],
    ],
)
def test_one_that_can_be_made_passes_a_dry_run(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = words
    assert cli.main(["train", QUICKSTART, "--dry-run", f"--fleet.provisioner={name}", *options]) == 0
    assert f'provisioner = "{name}"' in capsys.readouterr().out


CLOUD = """#!/bin/sh
cd "$(dirname "$0")/cloud"
case "$1" in
add) touch box; sleep 5; echo box ;;
release) sleep 0.2; rm -f "$2" ;;
list) ls ;;
esac
"""


class Prompts(list[int]):
    """So many, whatever they are."""

    origins: ClassVar[list[int]] = []

    @property
    def prompts(self) -> list[int]:
        return list(self)


def test_a_run_whose_model_can_t_be_loaded_leaves_no_machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager asks for machines while the trainer still loads."""
    script, cloud = here / "cloud.sh", here / "cloud"
    script.write_text(CLOUD)
    script.chmod(0o755)
    cloud.mkdir()

    def too_large(run: object, base: Path) -> None:
        deadline = time.monotonic() + 60
        while not list(cloud.iterdir()):
            assert time.monotonic() < deadline, "no machine was asked for"
            time.sleep(0.01)
        raise PenstockError("out of memory: the model is too large")

    monkeypatch.setattr(run_local._Run, "_learner", too_large)
    prompts = (here, Prompts([1] * 64), Prompts(), None)
    monkeypatch.setattr(run_local._Run, "_model_and_prompts", lambda run, held: prompts)
    options = [f"--fleet.options.command={script}", "--fleet.first=1", "--fleet.ceiling=1", "--fleet.release_s=30"]
    assert cli.main(["train", QUICKSTART, "--fleet.provisioner=command", *options, "--output_dir=runs"]) == 1
    assert not list(cloud.iterdir())


def test_a_run_that_is_interrupted_while_its_manager_starts_leaves_no_machine(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens, and has asked for a machine before its run knows of it."""
    script, cloud = here / "cloud.sh", here / "cloud"
    script.write_text(
        CLOUD.replace("touch box; sleep 5; echo box", "touch ../asked; sleep 5; touch box ../made; echo box")
    )
    script.chmod(0o755)
    cloud.mkdir()
    start = LocalProcesses.start_manager

    def interrupted(processes: LocalProcesses) -> str:
        start(processes)
        deadline = time.monotonic() + 60
        while not (here / "asked").exists():
            assert time.monotonic() < deadline, "no machine was asked for"
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalProcesses, "start_manager", interrupted)
    prompts = (here, Prompts([1] * 64), Prompts(), None)
    monkeypatch.setattr(run_local._Run, "_model_and_prompts", lambda run, held: prompts)
    options = [f"--fleet.options.command={script}", "--fleet.first=1", "--fleet.ceiling=1", "--fleet.release_s=30"]
    with contextlib.suppress(KeyboardInterrupt):
        cli.main(["train", QUICKSTART, "--fleet.provisioner=command", *options, "--output_dir=runs"])
    deadline = time.monotonic() + 60
    while not (here / "made").exists():
        assert time.monotonic() < deadline, "the script was ended before it had made the machine"
        time.sleep(0.01)
    assert not list(cloud.iterdir())


@pytest.mark.parametrize(("there", "named", "asking"), [(["box"], ["box"], 0.0), (["box"], [], 1.0), ([], [], 0.0)])
def test_a_run_whose_manager_does_not_start_releases_what_an_earlier_one_had(
    there: list[str],
    named: list[str],
    asking: float,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`asking`: the earlier one ended while it asked for a machine, and its account can't name that."""
    script, cloud = here / "cloud.sh", here / "cloud"
    script.write_text(CLOUD + "echo called >> ../calls\n")
    script.chmod(0o755)
    cloud.mkdir()
    for machine in there:
        (cloud / machine).touch()

    def none(processes: LocalProcesses) -> str:
        folder = next((here / "runs").iterdir())
        account = {"spent": 1.0, "wanted": 1, "machines": named, "at": time.time(), "asking": asking}
        (folder / "fleet_account.json").write_text(json.dumps(account))
        raise PenstockError("the manager did not start (exit code 1)")

    monkeypatch.setattr(LocalProcesses, "start_manager", none)
    prompts = (here, Prompts([1] * 64), Prompts(), None)
    monkeypatch.setattr(run_local._Run, "_model_and_prompts", lambda run, held: prompts)
    options = [f"--fleet.options.command={script}", "--fleet.release_s=30"]
    assert cli.main(["train", QUICKSTART, "--fleet.provisioner=command", *options, "--output_dir=runs"]) == 1
    assert not list(cloud.iterdir())
    assert (here / "calls").exists() == bool(there), "where nothing was asked for, nobody is bothered"
    assert "the manager did not start" in capsys.readouterr().err
