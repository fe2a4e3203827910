"""The quickstart as a newcomer runs it: whole runs in processes of their own, over several seeds.

Each seed makes its own model (its warm start is part of the time) and trains it; a control run replaces the reward by
a random one, which must teach nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, at_least, at_most, skipped
from penstock.errors import PenstockError

DESCRIPTION = "the quickstart over three seeds: wall time, held-out accuracy before and after, a random-reward control"

CONFIG = Path(__file__).parents[3] / "configs" / "quickstart.toml"
SEEDS = (0, 1, 2)
QUICK_STEPS = 40
WALL_S = 240
BEFORE, AFTER = 0.35, 0.80
RUN_DEADLINE_S = 600


def run(quick: bool) -> list[Result]:
    if not CONFIG.is_file():
        return [skipped("quickstart", "s", f"{CONFIG.name} is not beside this installation; run from a clone")]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="penstock-quickstart-") as folder:
        if quick:
            summary, wall_s = _train(Path(folder), 0, f"--train.steps={QUICK_STEPS}")
            note = f"{QUICK_STEPS} steps only; the targets are for the whole run"
            return [
                Result("wall time, model made on the way", wall_s, "s", note=note),
                at_most("held-out accuracy before", summary["accuracy_before"], BEFORE, "share"),
                Result("held-out accuracy after", summary["accuracy_after"], "share", note=note),
                at_most("samples lost", summary["samples_lost"], 0, "samples"),
            ]
        for seed in SEEDS:
            summary, wall_s = _train(Path(folder), seed)
            results += [
                at_most(f"seed {seed}: wall time, model made on the way", wall_s, WALL_S, "s"),
                at_most(f"seed {seed}: held-out accuracy before", summary["accuracy_before"], BEFORE, "share"),
                at_least(f"seed {seed}: held-out accuracy after", summary["accuracy_after"], AFTER, "share"),
                at_most(f"seed {seed}: samples lost", summary["samples_lost"], 0, "samples"),
                Result(f"seed {seed}: tokens generated twice", summary["tokens_recomputed"], "tokens"),
                Result(f"seed {seed}: trainer waited", summary["trainer_wait_share"], "share"),
            ]
        control, _ = _train(Path(folder), SEEDS[0], "--reward.function=penstock.reward.verifiers:random_reward")
        rise = control["accuracy_after"] - control["accuracy_before"]
        results.append(at_most("random reward: rise of held-out accuracy", rise, 0.0, "share"))
    return results


def _train(folder: Path, seed: int, *overrides: str) -> tuple[dict[str, Any], float]:
    """One run in a folder of its own; its summary, and the whole command's wall time in seconds."""
    place = Path(tempfile.mkdtemp(prefix=f"seed-{seed}-", dir=folder))
    words = [sys.executable, "-m", "penstock", "train", str(CONFIG), f"--output_dir={place}", "--observe.view=none"]
    words += [f"--seed={seed}", f"--model.warm_start.seed={seed}", f"--model.warm_start.cache_dir={place / 'models'}"]
    began = time.monotonic()
    done = subprocess.run([*words, *overrides], capture_output=True, text=True, timeout=RUN_DEADLINE_S)
    wall_s = time.monotonic() - began
    if done.returncode != 0:
        raise PenstockError(f"the quickstart ended with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads((place / "quickstart-001" / "summary.json").read_text()), wall_s
