"""`penstock train` with a reference on workers of its own, on one rank and on two, beside one that the actor has."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_torchrun import torchrun
from test_train_command import CONFIG, ENVIRONMENT, ONE_ENGINE, command, lines

pytestmark = pytest.mark.ci
PATIENCE_S = 240
KL = [ONE_ENGINE, "--train.steps=3", "--train.kl_coef=0.1", "--train.lr=1e-2", "--data.eval=[]"]
WORKERS = "--train.reference.workers=2"


def kl(folder: Path, models: Path, command: list[str]) -> list[float]:
    """Each step's KL to the reference, of a run whose samples all have a score."""
    folder.mkdir()
    (folder / "tiny.toml").write_text(CONFIG.replace("CACHE", str(models)))
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = lines(folder / "runs" / "tiny-001" / "metrics.jsonl")
    assert [row["unscored"] for row in rows] == [0, 0, 0]
    return [row["kl"] for row in rows]


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory, models: Path) -> list[float]:
    """Of a run whose actor has the reference."""
    return kl(tmp_path_factory.mktemp("beside") / "run", models, command("tiny.toml", *KL))


@pytest.mark.parametrize("start", [command, torchrun])
def test_a_run_holds_to_workers_as_to_a_reference_beside_the_actor(
    tmp_path: Path, models: Path, beside: list[float], start: Callable[..., list[str]]
) -> None:
    # The first step begins as the reference is; what it learns takes it away from there.
    assert beside[0] == pytest.approx(0, abs=1e-6)
    assert beside[-1] > 1e-2
    assert kl(tmp_path / "run", models, start("tiny.toml", *KL, WORKERS)) == pytest.approx(beside, rel=1e-3, abs=1e-6)
