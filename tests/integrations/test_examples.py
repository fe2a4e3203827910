"""The examples run as a reader runs them: offline, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str) -> str:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_judges_example_scores_what_can_be_scored() -> None:
    said = run("judge.py")
    assert "I believe it to be 3  0.8125  {'correct': 1.0, 'brief': 2.0}" in said
    assert "32 scored, 8 unscored" in said


def test_the_gateways_example_serves_processes_that_know_nothing_of_penstock() -> None:
    assert "4 processes, 4" in run("gateway_workers.py")


def test_slimes_example_leaves_the_unscored_sample_out_of_the_loss() -> None:
    said = run("slime_reward.py").splitlines()
    assert [line.split()[:2] for line in said[:2]] == [["5", "1.0"], ["6", "0.0"]]
    assert "left out of the loss: judge: no verdict" in said[2]
