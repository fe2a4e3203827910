"""Reward modes: how much of a reward's work a step hides, and how much slower it makes the trainer meanwhile.

The real streaming loop, manager and agents, with paced engines and paced passes: a step of 10 s, nearly all of it
rollout, which is the hardest case, since the reward of the last samples has nothing left to hide behind. The reward is
5 s of work for the whole batch: Python that computes, or a call by HTTP that waits. Steps with it stand beside steps of
the same samples whose reward is instant. In every pass the main thread does a fixed amount of Python; the time that
takes, beside that of the instant steps, is the driver's slowdown.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, at_most, median, skipped
from penstock.bench.fidelity_run import small_llama
from penstock.bench.rig import MadePrompts, Rig, local_rig, one_by_one, open_scorer, timed_step
from penstock.config.run import RunConfig
from penstock.reward.scorer import Scorer
from penstock.train.actor import Actor
from penstock.train.batching import PassBatch
from penstock.train.edge import EdgeLoop
from penstock.train.learner import Learner
from penstock.train.loop import Trainer

DESCRIPTION = "What a reward adds to a step in each reward.mode, and how much it slows the trainer meanwhile"

PROMPTS = 24
SAMPLES_PER_PROMPT = 8
SAMPLES = PROMPTS * SAMPLES_PER_PROMPT
OUTPUT_TOKENS = 48
MICRO_BATCH_SAMPLES = 16
ENGINES = 2
CALL_S = 120.0
FUNCTIONS = "penstock.bench.reward_modes_functions"
MODES = ("sync", "thread", "process", "ray")
PROCESSES = 2


@dataclass(frozen=True)
class Times:
    """Seconds: of a step, of the whole batch's reward one sample after another, and the most that may be added."""

    step: float
    reward: float
    added: float


FULL, QUICK = Times(10.0, 5.0, 0.3), Times(2.0, 1.0, 0.06)


@dataclass
class Seen:
    """Of steps of one kind: their seconds, and the main thread's for its fixed work in them."""

    steps_s: list[float] = field(default_factory=list)
    driver_s: list[float] = field(default_factory=list)


class _Driver(Actor):
    """Passes that do a fixed amount of Python, and last at least `pass_s`."""

    loops = 0
    pass_s = 0.0
    worked_s = 0.0

    def accumulate(self, batch: PassBatch) -> None:
        began = time.perf_counter()
        super().accumulate(batch)
        self.worked_s += _fixed_work(self.loops)
        time.sleep(max(0.0, self.pass_s - (time.perf_counter() - began)))


def run(quick: bool) -> list[Result]:
    times, repetitions = (QUICK, 3) if quick else (FULL, 2)
    modes = [mode for mode in MODES if mode != "ray" or importlib.util.find_spec("ray")]
    with tempfile.TemporaryDirectory(prefix="pst-modes-") as name:
        small_llama().save_pretrained(Path(name) / "model")
        seen = _measured(Path(name), times, modes, repetitions)
    results = [row for kind in ("computes", "waits") for mode in modes for row in _rows(kind, mode, seen, times)]
    if "ray" not in modes:
        results.append(skipped("ray", "s", "pip install 'penstock[ray]'"))
    return results


def _rows(kind: str, mode: str, seen: Mapping[tuple[str, str], Seen], times: Times) -> list[Result]:
    instant, mine = seen["instant", "thread"], seen[kind, mode]
    plain_s = median(instant.steps_s)
    added_s = median(mine.steps_s) - plain_s
    note = (
        f"{median(mine.steps_s):.2f} against {plain_s:.2f} s; the reward alone, one after another, {times.reward:g} s"
    )
    what = f"a reward that {kind}, {mode}"
    bound = mode in ("process", "ray") or (mode == "thread" and kind == "waits")
    added = f"{what}: added to the step"
    slower = median(mine.driver_s) / median(instant.driver_s)
    return [
        at_most(added, added_s, times.added, "s", note) if bound else Result(added, added_s, "s", note=note),
        Result(f"{what}: driver slowdown", slower, "x"),
    ]


def _measured(folder: Path, times: Times, modes: Sequence[str], repetitions: int) -> dict[tuple[str, str], Seen]:
    """Every kind of step in turn, several times over, after one that warms up what they share."""
    kinds = [("instant", "thread"), *((kind, mode) for kind in ("computes", "waits") for mode in modes)]
    seen: dict[tuple[str, str], Seen] = {kind: Seen() for kind in kinds}
    with _stage(folder, times) as stage:
        trainers = {kind: stage.trainer(*kind, times) for kind in kinds}
        stage.step(trainers[kinds[0]])
        for _ in range(repetitions):
            for kind in kinds:
                step_s, driver_s = stage.step(trainers[kind])
                seen[kind].steps_s.append(step_s)
                seen[kind].driver_s.append(driver_s)
    return seen


@dataclass
class _Stage:
    config: RunConfig
    driver: _Driver
    rig: Rig
    parts: contextlib.ExitStack
    url: str
    """Of a server that answers each sample's question after its share of the reward's time."""
    done: int = 0

    def trainer(self, kind: str, mode: str, times: Times) -> Trainer:
        """The loop with a reward of its own; manager, machines and actor are shared."""
        each_s = times.reward / SAMPLES
        rewards: dict[str, tuple[str, dict[str, Any]]] = {
            "instant": ("computing", {"seconds": 0.0}),
            "computes": ("computing", {"seconds": each_s}),
            "waits": ("asking", {"url": self.url}),
        }
        function, options = rewards[kind]
        scorer = Scorer(f"{FUNCTIONS}:{function}", options=options, mode=mode, processes=PROCESSES)
        open_scorer(self.rig.ports.edge, self.parts, scorer, CALL_S)
        return Trainer(self.config, Learner(self.config, self.driver), replace(self.rig.ports, scorer=scorer))

    def step(self, trainer: Trainer) -> tuple[float, float]:
        """One step's seconds, and those of the main thread's fixed work."""
        trainer.step = trainer.version = self.done
        if not self.done:
            trainer.publish()
        self.rig.until_ready(ENGINES, self.done)
        self.driver.worked_s = 0.0
        metrics = timed_step(trainer)
        self.done += 1
        return metrics["step_s"], self.driver.worked_s


@contextlib.contextmanager
def _stage(folder: Path, times: Times) -> Iterator[_Stage]:
    config = _config(folder / "model", times)
    driver = _Driver(folder / "model", config.train, total_optimizer_steps=1000, horizon_tokens=OUTPUT_TOKENS)
    passes = SAMPLES // MICRO_BATCH_SAMPLES
    driver.pass_s = times.step / 2 / passes
    driver.loops = _loops_of(0.75 * driver.pass_s)
    with (
        local_rig(config, folder, MadePrompts(PROMPTS), ENGINES) as rig,
        _server(times.reward / SAMPLES) as url,
        contextlib.ExitStack() as parts,
    ):
        yield _Stage(config, driver, rig, parts, url)


@contextlib.contextmanager
def _server(wait_s: float) -> Iterator[str]:
    """Answers any question after `wait_s` with 0 or 1; on a loop of its own."""
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        await asyncio.sleep(wait_s)
        return web.Response(text=str(int(request.query["replica"]) % 2))

    async def opened() -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    with EdgeLoop("reward-service") as loop:
        runner, port = loop.run(opened(), "starting the reward's server", CALL_S)
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            loop.run(runner.cleanup(), "ending the reward's server", CALL_S)


def _fixed_work(loops: int) -> float:
    """Seconds that a fixed amount of pure Python takes."""
    began, total = time.perf_counter(), 0
    for k in range(loops):
        total += k & 7
    return time.perf_counter() - began


def _loops_of(seconds: float) -> int:
    """How much of that work fits in `seconds` on this machine, by the shortest of several tries."""
    loops = 200_000
    return int(loops * seconds / min(_fixed_work(loops) for _ in range(7)))


def _config(model: Path, times: Times) -> RunConfig:
    tokens_per_s = SAMPLES * OUTPUT_TOKENS / (0.9 * times.step)
    return one_by_one(model, PROMPTS, SAMPLES_PER_PROMPT, OUTPUT_TOKENS, MICRO_BATCH_SAMPLES, tokens_per_s / ENGINES)
