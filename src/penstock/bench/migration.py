"""What losing an engine costs: SIGKILL in mid-generation against the same batch undisturbed.

Real processes: a manager, built-in engines in float32, weights over TCP. Both runs are compared token for token, and
every log-probability with a fresh forward pass of transformers' own model. What a user would otherwise do, and the
baseline here, is to generate the lost samples again from their start. What it costs on each kind of engine, with real
servers among them, is `migration_served`'s, and stands in the same table.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.bench import migration_served
from penstock.bench.common import Result, at_least, at_most, median
from penstock.bench.house import RUN_SEED, House, open_house, prompts, small_llama
from penstock.instance.builtin.draw import decision_gap
from penstock.instance.builtin.philox import uniforms
from penstock.observe.events import InstanceChanged, SamplesMoved
from penstock.rollout.client import FinishedSample
from penstock.sample import Prompt, SampleId, sample_seed
from penstock.wire import Sampling

DESCRIPTION = "losing an engine in mid-generation: what is lost, repeated, changed, and what it costs"

HEARTBEAT_S = 1.0
"""The house's."""
HEARTBEATS = 3
TICK_S = 0.1
"""Between two looks of the manager at who is silent."""
NEAR_TIE = 1e-4
"""Gap between two choices (logits, or probability where sampled) under which float noise may decide."""
FRAME_STEPS = 4
MOVES_NOTHING = {"balance": "penstock.rollout.balance:ShortestQueue"}

Samples = dict[tuple[int, int], FinishedSample]


@dataclass
class Disturbed:
    """One batch, undisturbed and with an engine killed."""

    quiet: Samples
    killed: Samples
    quiet_s: float
    killed_s: float
    samples_moved: int
    tokens_kept: int
    """Of the moved samples: what they had when their engine died."""
    tokens_drawn_twice: int
    """Drawn by the dead engine and never received."""
    noticed_s: float
    """From SIGKILL to the manager's word that the instance is gone, by the wall clock."""


@dataclass
class Difference:
    """How two runs of one batch differ."""

    samples: int
    different: list[str] = field(default_factory=list)
    """One sentence for each sample that is not token for token the same."""
    widest_gap: float = 0.0
    """Of the decisions where they differ first."""

    @property
    def identical_share(self) -> float:
        return 1 - len(self.different) / self.samples


def fresh_logits(model: Any, prompt: Prompt, sample: FinishedSample) -> torch.Tensor:
    """Logits [T, V] that each output token was drawn from, by one forward pass over the whole sequence."""
    ids = [*prompt.token_ids, *sample.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    return logits[len(prompt.token_ids) - 1 : len(ids) - 1]


def worst_logprob_error(model: Any, asked: Sequence[Prompt], samples: Samples) -> float:
    """Largest distance of a token's log-probability from that of a fresh forward pass."""
    worst = 0.0
    for (prompt, _), sample in samples.items():
        logits_TV = fresh_logits(model, asked[prompt], sample)
        token_ids = torch.tensor(sample.token_ids.tolist())
        expected = torch.log_softmax(logits_TV, -1).gather(1, token_ids[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(sample.logprobs.tolist())).abs().max()))
    return worst


def compare(
    model: Any, asked: Sequence[Prompt], batch: str, sampling: Sampling, quiet: Samples, killed: Samples
) -> Difference:
    """Where two runs of one batch say different things, and how near to a tie the first such token was."""
    found = Difference(len(quiet))
    for (prompt, replica), sample in quiet.items():
        at = first_difference(sample, killed[prompt, replica])
        if at is None:
            continue
        u = uniforms(sample_seed(RUN_SEED, SampleId(batch, prompt, replica)), at, 1)[0]
        gap = decision_gap(fresh_logits(model, asked[prompt], sample)[at], sampling, u)
        found.different.append(f"{batch}/{prompt}.{replica} differs first at token {at}, where the gap is {gap:.2e}")
        found.widest_gap = max(found.widest_gap, gap)
    return found


def first_difference(one: FinishedSample, other: FinishedSample) -> int | None:
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    at = next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), None)
    if at is None and len(one.token_ids) != len(other.token_ids):
        return min(len(one.token_ids), len(other.token_ids))
    return at


async def disturb(
    house: House,
    batch: str,
    asked: Sequence[Prompt],
    samples_per_prompt: int,
    sampling: Sampling,
    victim: str,
    after_tokens: int,
) -> Disturbed:
    """Runs a batch undisturbed and again, killing `victim` once it has drawn `after_tokens` tokens of it."""
    engine = house.processes.engines[victim]
    # One that is still starting would find that the others have done its part.
    await house.until(lambda: house.processes.engines.keys() <= _were_ready(house), "all engines ready", 120.0)
    began = time.monotonic()
    quiet = await house.finish(batch, await house.submit(batch, asked, samples_per_prompt, sampling))
    quiet_s = time.monotonic() - began
    moved_before = len(house.events_of(SamplesMoved))
    drawn_before = engine.tokens_generated() or 0
    began = time.monotonic()
    collected = await house.submit(batch, asked, samples_per_prompt, sampling)
    await house.until(lambda: (engine.tokens_generated() or 0) > drawn_before + after_tokens, f"{victim} at work")
    killed_at = time.time()
    house.processes.kill_engine(victim, "the benchmark")
    killed = await house.finish(batch, collected)
    killed_s = time.monotonic() - began
    moved = house.events_of(SamplesMoved)[moved_before:]
    gone = _gone(house, victim)
    return Disturbed(
        quiet=quiet,
        killed=killed,
        quiet_s=quiet_s,
        killed_s=killed_s,
        samples_moved=sum(event.samples for event in moved),
        tokens_kept=sum(event.tokens_kept for event in moved),
        tokens_drawn_twice=(engine.tokens_generated() or 0) - sum(event.tokens_accepted for event in gone),
        noticed_s=gone[-1].ts - killed_at,
    )


def _were_ready(house: House) -> set[str]:
    return {event.name for event in house.events_of(InstanceChanged) if event.after == "ready"}


def _gone(house: House, name: str) -> list[InstanceChanged]:
    return [event for event in house.events_of(InstanceChanged) if event.after == "gone" and event.name == name]


@dataclass
class Silent:
    """A batch in which an engine fell silent, and came back after it was given up."""

    samples: Samples
    noticed_s: float
    """From SIGSTOP to the manager's word that the instance is gone, by the wall clock."""


async def fall_silent(
    house: House, batch: str, asked: Sequence[Prompt], samples_per_prompt: int, sampling: Sampling, victim: str
) -> Silent:
    """SIGSTOP in mid-generation, and SIGCONT once it is given up: what it then says comes too late."""
    engine = house.processes.engines[victim]
    drawn_before, gone_before = engine.tokens_generated() or 0, len(_gone(house, victim))
    collected = await house.submit(batch, asked, samples_per_prompt, sampling)
    await house.until(lambda: (engine.tokens_generated() or 0) > drawn_before + 5 * len(asked), f"{victim} at work")
    stopped_at = time.time()
    os.killpg(engine.process.pid, signal.SIGSTOP)
    try:
        await house.until(lambda: len(_gone(house, victim)) > gone_before, f"{victim} to be given up")
    finally:
        os.killpg(engine.process.pid, signal.SIGCONT)
    return Silent(await house.finish(batch, collected), _gone(house, victim)[-1].ts - stopped_at)


def run(quick: bool) -> list[Result]:
    model = small_llama()
    cases = [
        ("greedy", Sampling(max_new_tokens=160, temperature=0.0, stop_ids=(11,))),
        ("sampled", Sampling(max_new_tokens=160, temperature=0.8, top_p=0.97, top_k=60, stop_ids=(11,))),
    ]
    asked = prompts(60 if quick else 150)
    with tempfile.TemporaryDirectory(prefix="penstock-migration-") as folder:
        runs, silent = asyncio.run(_measure(Path(folder), model, cases, asked))
    results: list[Result] = []
    for batch, sampling in cases:
        results += _results(model, asked, batch, sampling, runs[batch])
    batch, sampling = cases[-1]
    after_silence = compare(model, asked, batch, sampling, runs[batch].quiet, silent.samples)
    everything = list(runs.values())
    moved = sum(run.samples_moved for run in everything)
    kept = sum(run.tokens_kept for run in everything)
    twice = sum(run.tokens_drawn_twice for run in everything)
    results += [
        Result("samples moved", moved, "samples"),
        at_most("tokens generated twice, for each moved sample", twice / max(1, moved), FRAME_STEPS, "tokens"),
        at_most(
            "tokens generated twice / generating the moved samples again from their start",
            twice / max(1, twice + kept),
            0.25,
            "ratio",
        ),
        Result(
            "SIGKILL noticed by the closed socket after",
            max(run.noticed_s for run in everything),
            "s",
            note="the end of the process included",
        ),
        at_most(
            "SIGSTOP noticed after",
            silent.noticed_s,
            HEARTBEATS * HEARTBEAT_S + TICK_S,
            "s",
            note=f"{HEARTBEATS} heartbeats of {HEARTBEAT_S:g} s, and the manager looks every {TICK_S:g} s",
        ),
        at_least(
            "samples of that batch token for token the same, late frames refused",
            after_silence.identical_share,
            0.995,
            "share",
            note="; ".join(after_silence.different[:3]) or "none differs",
        ),
        Result(
            "batch with a kill / undisturbed",
            median([run.killed_s / run.quiet_s for run in everything]),
            "ratio",
            note="one engine of four is missing from the kill on; all share this machine's cores",
        ),
    ]
    return results + migration_served.run(quick)


async def _measure(
    folder: Path, model: Any, cases: Sequence[tuple[str, Sampling]], asked: Sequence[Prompt]
) -> tuple[dict[str, Disturbed], Silent]:
    found = {}
    async with open_house(folder, engines=4, rollout=MOVES_NOTHING, frame_steps=FRAME_STEPS) as house:
        await house.publish(0, model)
        # Engines that are still starting up would count against the undisturbed run.
        await house.until(lambda: _ready(house) == 4, "four engines")
        await house.finish("warm-up", await house.submit("warm-up", asked, 1, cases[0][1]))
        for number, (batch, sampling) in enumerate(cases):
            # Its share of the samples is then some 30 tokens into their answers.
            found[batch] = await disturb(house, batch, asked, 2, sampling, f"engine-{number}", 15 * len(asked))
        # The same batch once more, by the two that are left.
        batch, sampling = cases[-1]
        silent = await fall_silent(house, batch, asked, 2, sampling, f"engine-{len(cases)}")
    return found, silent


def _ready(house: House) -> int:
    return sum(row.state == "ready" for row in house.status[-1].instances) if house.status else 0


def _results(model: Any, asked: Sequence[Prompt], batch: str, sampling: Sampling, run: Disturbed) -> list[Result]:
    lost = len(run.quiet.keys() - run.killed.keys())
    difference = compare(model, asked, batch, sampling, run.quiet, run.killed)
    return [
        at_most(f"{batch}: samples lost", lost, 0, "samples"),
        at_least(f"{batch}: samples token for token the same", difference.identical_share, 0.995, "share"),
        at_most(
            f"{batch}: widest gap where one differs first",
            difference.widest_gap,
            NEAR_TIE,
            "logit or probability",
            note="; ".join(difference.different[:3]) or "none differs",
        ),
        at_most(
            f"{batch}: worst log-probability error against a fresh forward pass",
            worst_logprob_error(model, asked, run.killed),
            1e-3,
            "nat",
        ),
    ]
