"""The command that a run which broke off leaves behind."""

from __future__ import annotations

import shlex
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
