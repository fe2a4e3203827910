"""The real loop on machines that come and go by a script, against the simulator on what came of it.

The trainer's loop, the manager and every agent are as in any run, the agents in processes of their own; tokens and
passes are paced, so that a busy computer does not decide what is measured. Two engines are the trainer's own
(`rollout.window = "auto"`); remote ones go 2, 6, 0, 3: four join, all six are killed in mid-step, three join.

The simulator is given the same profile, the very lengths that the engines drew, and the moments of each step at which
machines connected and were lost (of each step and not of the run, or a second's drift would put an accident into
another step; one connects as much later as its first load took longer than loads do); its policies are those of the
manager. The trainer waits while it does not train and its devices do not
generate; from one turn to the other counts. The overheads of the real step (loading weights, handing over, publishing)
are measured in the run and are the simulator's too: what is compared is the waiting that the policies leave.

How long that is hangs on milliseconds: a sample that ends just before or just behind the manager's look at the window
makes it another window, and that every step after it. So the simulator goes through each run several times, with the
manager's ticks at other moments (which nobody knows of the real one), and the mean over these counts.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from penstock.bench.common import Result, at_most
from penstock.bench.fidelity_run import small_llama
from penstock.bench.rig import CALL_S, PROMPT_TOKENS, MadePrompts, local_rig, rig_config
from penstock.config.run import RunConfig
from penstock.instance.engine import SequenceStart
from penstock.instance.paced import paced_tokens
from penstock.observe.events import Event, InstanceChanged, SamplesMoved, WeightsLoaded, WindowChanged
from penstock.rollout.balanced import Balanced
from penstock.rollout.manager import TICK_S
from penstock.rollout.offload import Offload
from penstock.sample import SampleId, sample_seed
from penstock.simulate.machine import SimSample
from penstock.simulate.outcome import StepOutcome
from penstock.simulate.profiles import Lengths, MachineProfile, Prices, Profile, Training
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace
from penstock.simulate.world import World
from penstock.train.actor import Actor
from penstock.train.batching import PassBatch
from penstock.train.learner import Learner
from penstock.train.loop import Trainer
from penstock.train.mini_batch import OptimizerStep
from penstock.wire import Sampling

DESCRIPTION = "the real loop on a scripted trace of machines, its waits against the simulator's"

PROMPTS = 16
SAMPLES_PER_PROMPT = 8
MEAN_TOKENS = 100
MOST_TOKENS = 300
STOP_ID = 7
VOCAB = 101
RESERVED = 2
TOKENS_PER_S = 1200.0
"""Of one engine, over all that it runs."""
MAX_RUNNING = 16
MAX_PENDING = 8
FRAME_STEPS = 2
"""What is drawn is told so late at most; the simulator's machines tell at once."""
MICRO_BATCH_SAMPLES = 16
TRAIN_TOKEN_S = 2.8e-4
HEARTBEAT_S = 0.5
SCRIPT = (2, 6, 0, 3)
ROUNDS = 10
"""Of the same lengths two rounds differ by up to a third."""
REPLAYS = 16
"""Of each run in the simulator: over ticks at other moments the trainer's waiting differs by a factor of two."""
STUCK = 2.0
"""A step that takes so many times the simulator's longest is called stuck."""
EXPLAINED_S = 0.3
"""Two ticks and a hand-over: what a window may differ from what its events say."""


@dataclass
class Measured:
    """A run: metrics of its steps, its events, and when it began, in seconds since 1970."""

    began_ts: float = 0.0
    seed: int = 0
    """Of the run: lengths hang on it."""
    steps: list[dict[str, float]] = field(default_factory=list)
    began_s: list[float] = field(default_factory=list)
    """Of each step, since the run began."""
    events: list[Event] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        return sum(step["step_s"] for step in self.steps)

    def total(self, name: str) -> float:
        return sum(step[name] for step in self.steps)

    @property
    def rest_s(self) -> float:
        """Of a step, mean: neither training nor window nor wait, but weights published and the next step submitted."""
        rest = [s["step_s"] - s["train_s"] - s["trainer_wait_s"] - s["window_s"] for s in self.steps]
        return max(0.0, sum(rest) / len(rest))

    @property
    def load_s(self) -> float:
        """Of a machine, until it serves a version, mean."""
        loads = [event.wall_s for event in self.of_kind(WeightsLoaded)]
        return sum(loads) / len(loads)

    @property
    def hand_over_s(self) -> float:
        """From the end of a window until its samples went on elsewhere, mean."""
        taken: list[float] = []
        closed: WindowChanged | None = None
        for event in self.events:
            if isinstance(event, WindowChanged) and event.what == "closed":
                closed = event
            elif isinstance(event, SamplesMoved) and closed is not None and event.cause == closed.cause:
                taken.append(event.ts - closed.ts)
        return sum(taken) / len(taken) if taken else 0.0

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class PacedActor(Actor):
    """Passes that last `TRAIN_TOKEN_S` for each token, and weights that stay as they are."""

    def accumulate(self, batch: PassBatch) -> None:
        tokens = int(batch.mask_BT.sum()) + PROMPT_TOKENS * len(batch.mask_BT)
        time.sleep(tokens * TRAIN_TOKEN_S)

    def optimizer_step(self, position: int) -> OptimizerStep:
        return OptimizerStep(True, 0.0, 0.0)


class _Machines:
    """Agents in processes, by name."""

    def __init__(self, url: str, token: str, folder: Path) -> None:
        self._url, self._token, self._folder = url, token, folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._born = 0

    def add(self, reserved: bool = False) -> None:
        name = f"{'own' if reserved else 'spot'}-{self._born}"
        self._born += 1
        words = ["--manager", self._url, "--name", name, "--engine", "paced", "--tokens-per-s", str(TOKENS_PER_S)]
        words += ["--mean-tokens", str(MEAN_TOKENS), "--max-running", str(MAX_RUNNING), "--preemption", "none"]
        words += ["--exit-with-stdin", *(["--reserved"] if reserved else [])]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "penstock", "join", *words],
                env={**os.environ, "PENSTOCK_TOKEN": self._token},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def remote(self, count: int) -> None:
        """So many remote ones: others are started, or the oldest killed."""
        names = [name for name in self._processes if name.startswith("spot")]
        for _ in range(count - len(names)):
            self.add()
        for name in names[: max(0, len(names) - count)]:
            self._kill(name)

    def close(self) -> None:
        for name in list(self._processes):
            self._kill(name)

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=CALL_S)
        if process.stdin is not None:
            process.stdin.close()


def run(quick: bool) -> list[Result]:
    """Rounds differ in the run's seed, and so in every length: one has some seconds of waiting alone."""
    phase_s, rounds = (15.0, 1) if quick else (40.0, ROUNDS)
    compared = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            measured = _measure(Path(name), phase_s, seed)
        compared.append(Round(measured, _replays(measured)))
    return _results(compared)


@dataclass
class Round:
    """One run, the simulator's on what came of it, and shares of the time in both: of the simulator's, means."""

    measured: Measured
    simulated: Sequence[Sequence[StepOutcome]]
    wait: float = field(init=False)
    """The trainer waits."""
    sim_wait: float = field(init=False)
    idle: float = field(init=False)
    """It waits, or its engines generate."""
    sim_idle: float = field(init=False)
    step: float = field(init=False)
    """Mean time of a step, real / simulated."""
    sim_waits: list[float] = field(init=False)
    """Of each replay."""

    def __post_init__(self) -> None:
        measured = self.measured
        self.wait = measured.total("trainer_wait_s") / measured.wall_s
        self.idle = self.wait + measured.total("window_s") / measured.wall_s
        shares = [self._shares(replay) for replay in self.simulated]
        self.sim_waits = [wait for wait, _, _ in shares]
        self.sim_wait, window, step_s = (fmean(column) for column in zip(*shares, strict=True))
        self.sim_idle = self.sim_wait + window
        self.step = measured.wall_s / len(measured.steps) / step_s

    def _shares(self, steps: Sequence[StepOutcome]) -> tuple[float, float, float]:
        """Of one replay: trainer waits, own engines generate, mean step in seconds."""
        wall_s = sum(step.times.step_s for step in steps)
        train_s = sum(step.times.train_s for step in steps) + len(steps) * self.measured.rest_s
        window_s = sum(step.times.window_s for step in steps)
        # As the real trainer counts it: all but training and windows, handing over included.
        return (wall_s - train_s - window_s) / wall_s, window_s / wall_s, wall_s / len(steps)

    @property
    def stuck(self) -> int:
        longest = max(step.times.step_s for replay in self.simulated for step in replay)
        return sum(step["step_s"] > STUCK * longest for step in self.measured.steps)

    @property
    def changes(self) -> list[WindowChanged]:
        return self.measured.of_kind(WindowChanged)

    @property
    def silent(self) -> int:
        """Changes of the window that no event explains."""
        return sum(not change.cause for change in self.changes) + _unexplained(self.measured, self.changes)


def _results(rounds: Sequence[Round]) -> list[Result]:
    """Medians over rounds; of what must not be, the sum."""
    changes = [change for each in rounds for change in each.changes]
    kinds = ", ".join(
        f"{sum(c.what == kind for c in changes)} {kind}" for kind in ("opened", "closed", "planned", "learned")
    )
    ratios = [each.wait / max(each.sim_wait, 1e-9) for each in rounds]
    idle = [each.idle / each.sim_idle for each in rounds]
    steps = [each.step for each in rounds]
    note = "; ".join(f"{len(each.measured.steps)} steps in {each.measured.wall_s:.0f} s" for each in rounds)
    spread = f"mean of {len(rounds[0].simulated)} replays a run, which are from " + "; ".join(
        f"{min(each.sim_waits):.3f} to {max(each.sim_waits):.3f}" for each in rounds
    )
    return [
        Result("trainer waits, real loop", median(each.wait for each in rounds), "share of the time", note=note),
        Result("trainer waits, simulator", median(each.sim_wait for each in rounds), "share of the time", note=spread),
        at_most("trainer waits, real loop / simulator", median(ratios), 1.10, "ratio", _each(ratios)),
        Result("trainer waits or its engines generate, real loop", median(e.idle for e in rounds), "share of the time"),
        Result(
            "trainer waits or its engines generate, simulator", median(e.sim_idle for e in rounds), "share of the time"
        ),
        at_most("trainer waits or its engines generate, real / simulator", median(idle), 1.10, "ratio", _each(idle)),
        Result("step, real loop / simulator", median(steps), "ratio of the mean times", note=_each(steps)),
        at_most(
            f"steps over {STUCK:g} times the simulator's longest", float(sum(e.stuck for e in rounds)), 0.0, "steps"
        ),
        at_most(
            "changes of the window that no event explains", float(sum(e.silent for e in rounds)), 0.0, "changes", kinds
        ),
    ]


def _each(values: Sequence[float]) -> str:
    return "each: " + ", ".join(f"{value:.3f}" for value in values) if len(values) > 1 else ""


def _unexplained(measured: Measured, changes: Sequence[WindowChanged]) -> int:
    """Steps whose engines generated for another time than the events of their window say."""
    found = 0
    for number, step in enumerate(measured.steps):
        opened: float | None = None
        told_s = 0.0
        for change in changes:
            if change.batch != f"train-{number}":
                continue
            if change.what == "opened":
                opened = change.elapsed_s
            elif change.what == "closed" and opened is not None:
                told_s += change.elapsed_s - opened
                opened = None
        found += abs(told_s - step["window_s"]) > EXPLAINED_S
    return found


# ---- the real loop


def _measure(folder: Path, phase_s: float, seed: int) -> Measured:
    measured = Measured(seed=seed)
    small_llama().save_pretrained(folder / "model")
    config = _config(folder / "model", seed)
    actor = PacedActor(folder / "model", config.train, total_optimizer_steps=1, horizon_tokens=MOST_TOKENS)
    with (
        local_rig(config, folder, MadePrompts(PROMPTS), 0, (STOP_ID,), measured.events.append) as rig,
        contextlib.closing(_Machines(rig.url, rig.token, folder)) as machines,
    ):
        trainer = Trainer(config, Learner(config, actor), rig.ports)
        trainer.publish()
        for _ in range(RESERVED):
            machines.add(reserved=True)
        machines.remote(SCRIPT[0])
        rig.until_ready(RESERVED + SCRIPT[0])
        measured.began_ts = time.time()
        began = time.monotonic()
        script = threading.Thread(target=_follow, args=(machines, phase_s), name="script", daemon=True)
        script.start()
        while time.monotonic() - began < phase_s * len(SCRIPT):
            measured.began_s.append(time.monotonic() - began)
            measured.steps.append(trainer.train_step())
        script.join(CALL_S)
    return measured


def _follow(machines: _Machines, phase_s: float) -> None:
    for count in SCRIPT[1:]:
        time.sleep(phase_s)
        machines.remote(count)


def _config(model: Path, seed: int) -> RunConfig:
    rollout = {
        "prompts_per_step": PROMPTS,
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "heartbeat_s": HEARTBEAT_S,
        "max_pending_per_instance": MAX_PENDING,
        "window": "auto",
        "sampling": {"max_new_tokens": MOST_TOKENS},
        "engines": {"count": 0, "max_context_tokens": 1024, "frame_steps": FRAME_STEPS},
    }
    train = {
        "tokens_per_micro_batch": MICRO_BATCH_SAMPLES * (PROMPT_TOKENS + MOST_TOKENS),
        "min_samples_per_micro_batch": MICRO_BATCH_SAMPLES,
    }
    return rig_config(model, rollout, train, seed=seed, manager={"journal": "off"})


# ---- the simulator


class _Stepwise(World):
    """Changes of the trace happen so long after the beginning of a step; `changes` has them by step."""

    changes: dict[int, list[Change]]

    def _begin(self) -> None:
        number = len(self.outcome.steps)
        super()._begin()
        for change in self.changes.get(number, ()):
            self.clock.after(change.at_s, functools.partial(self.remotes.change, change))


def _replays(measured: Measured) -> list[list[StepOutcome]]:
    """The run in the simulator, with the manager's ticks at moments evenly apart."""
    return [_simulate(measured, TICK_S * (number + 0.5) / REPLAYS) for number in range(REPLAYS)]


def _simulate(measured: Measured, first_tick_s: float = TICK_S) -> list[StepOutcome]:
    """As many steps as the real loop did."""
    first, later = _changes(measured)
    strategy = Strategy("penstock", Balanced(MAX_PENDING), Offload(), FixedSize(sum(SCRIPT)))
    trace = Trace(tuple(first), measured.wall_s)
    samples = functools.partial(_samples, measured.seed)
    world = _Stepwise(_profile(measured), trace, strategy, samples=samples, first_tick_s=first_tick_s)
    world.changes = later
    return world.run(steps=len(measured.steps)).steps


def _profile(measured: Measured) -> Profile:
    machine = MachineProfile(
        step_base_s=1e-6,
        sequence_s=1 / TOKENS_PER_S,
        context_s=0.0,
        prefill_s_per_token=0.0,
        max_running=MAX_RUNNING,
        kv_tokens=1 << 30,
        link_gbit_s=1.0,
    )
    return Profile(
        name="paced",
        prompts=PROMPTS,
        samples_per_prompt=SAMPLES_PER_PROMPT,
        weights_gb=measured.load_s / 8,
        store_gbit_s=1e6,
        reserved_instances=RESERVED,
        reserved=machine,
        spot=machine,
        max_pending_per_instance=MAX_PENDING,
        heartbeat_s=HEARTBEAT_S,
        training=Training(
            s_per_token=TRAIN_TOKEN_S,
            optimizer_s=measured.rest_s,
            switch_s=measured.hand_over_s,
            micro_batch_samples=MICRO_BATCH_SAMPLES,
        ),
        prices=Prices(reserved=0.0, spot=0.0, on_demand=0.0),
        lengths=Lengths(prompt_tokens=PROMPT_TOKENS, median_tokens=MEAN_TOKENS, max_tokens=MOST_TOKENS),
    )


def _changes(measured: Measured) -> tuple[list[Change], dict[int, list[Change]]]:
    """Remote machines that are there when the run begins; and which connect and are lost later, by step, with the
    seconds since that began."""
    first: list[Change] = []
    later: dict[int, list[Change]] = {}
    loads: dict[str, float] = {}
    for loaded in measured.of_kind(WeightsLoaded):
        loads.setdefault(loaded.instance, loaded.wall_s)
    load_s = measured.load_s
    for event in measured.of_kind(InstanceChanged):
        joined = not event.before
        if not event.name.startswith("spot") or not (joined or event.after == "gone"):
            continue
        at_s = event.ts - measured.began_ts
        if joined:
            at_s += max(0.0, loads.get(event.instance, 0.0) - load_s)
        if at_s > measured.began_s[-1] + measured.steps[-1]["step_s"]:
            # The run was over.
            continue
        step = bisect.bisect_right(measured.began_s, at_s) - 1
        if step < 0:
            first.append(Change(0.0, event.instance, joined))
        else:
            later.setdefault(step, []).append(Change(at_s - measured.began_s[step], event.instance, joined))
    return first, later


@functools.cache
def _lengths(run_seed: int, step: int) -> tuple[int, ...]:
    """What paced engines draw for a step's samples, which depends on nothing but who they are."""
    sampling = Sampling(max_new_tokens=MOST_TOKENS, stop_ids=(STOP_ID,))
    found = []
    for prompt in range(PROMPTS):
        for replica in range(SAMPLES_PER_PROMPT):
            seed = sample_seed(run_seed, SampleId(f"train-{step}", prompt, replica))
            start = SequenceStart(0, seed, [0], [], sampling)
            found.append(len(paced_tokens(start, 0, MOST_TOKENS, VOCAB, 1 / MEAN_TOKENS)[0]))
    return tuple(found)


def _samples(run_seed: int, step: int) -> list[SimSample]:
    return [
        SimSample(number, number // SAMPLES_PER_PROMPT, PROMPT_TOKENS, length)
        for number, length in enumerate(_lengths(run_seed, step))
    ]
