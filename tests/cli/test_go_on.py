"""The command that a run which broke off leaves behind."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.run_folder import how_to_go_on


@pytest.mark.parametrize("before", [[], ["--resume", "latest"], ["--resume=runs/other"], ["--resume"]])
def test_a_run_is_gone_on_with_by_the_words_that_it_was_started_with(before: list[str]) -> None:
    words = ["train", "my run.toml", "--train.steps=9", *before]
    assert shlex.split(how_to_go_on(words, Path("runs/a run-001"))) == [
        *("penstock", "train", "my run.toml", "--train.steps=9", "--resume=runs/a run-001")
    ]


def test_a_run_of_several_ranks_is_gone_on_with_by_torchrun() -> None:
    command = how_to_go_on(["train", "my.toml"], Path("runs/my-001"), ranks=2)
    assert command == "torchrun --nproc-per-node 2 -m penstock train my.toml --resume=runs/my-001"


@pytest.mark.parametrize("words", [("train", "{toml}", "--resume", "{none}"), ("export", "{none}", "{none}-out")])
def test_a_run_that_is_not_there_is_told_without_waiting_for_pytorch(words: tuple[str, ...], tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('[model]\npath = "m"\n[[data.train]]\nkind = "jsonl"\npath = "q"\n[reward]\nfunction = "a:b"\n')
    arguments = [word.format(toml=toml, none=tmp_path / "none") for word in words]
    script = (
        "import sys\nfrom penstock.cli import main\ncode = main()\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2), done.stderr
    assert "there is no such folder" in done.stderr
    assert "AssertionError" not in done.stderr
