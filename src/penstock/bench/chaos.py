"""Whether anything at all that may happen to machines changes what a run gets: seeded faults against a quiet run.

A run of ten steps on four machines, two of them processes of their own, with a real manager that journals, relays on
loopback and a weight store; what is drawn is known, since the paced engine draws by (seed, position). So every token
of every sample is compared, and with it the reward curve. How it is done is in `chaos_run`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.bench.chaos_plan import KINDS, plan
from penstock.bench.chaos_run import HEARTBEAT_S, Report, Shape, chaos_run
from penstock.bench.common import Result, at_least, at_most
from penstock.rollout.client import FinishedSample

DESCRIPTION = "2,000 seeded faults of every kind, manager's death included: what is lost, doubled or changed (nothing)"

FAULTS_A_RUN = 200

Samples = Mapping[tuple[int, int], FinishedSample]


def run(quick: bool) -> list[Result]:
    shape = Shape()
    quiet = asyncio.run(chaos_run(shape, []))
    reports = []
    for seed in range(1 if quick else 10):
        reports.append(asyncio.run(chaos_run(shape, plan(seed, FAULTS_A_RUN, shape.tokens))))
    injected = sum((report.injected for report in reports), Counter[str]())
    results = [
        at_least("faults", injected.total(), FAULTS_A_RUN * len(reports), "faults"),
        at_least("kinds of fault", len(injected), len(KINDS), "kinds"),
        Result("instances lost", sum(report.lost for report in reports), "instances"),
        at_most("samples missing", sum(_missing(quiet, report) for report in reports), 0, "samples"),
        at_most("samples twice", sum(report.twice for report in reports), 0, "samples"),
        at_most(
            "samples set aside as failed",
            sum(len(report.failed) for report in reports),
            0,
            "samples",
            note="; ".join(cause for report in reports for cause in report.failed[:2]),
        ),
        at_most(
            "samples not token for token, or not log-probability for log-probability, the quiet run's",
            sum(different(quiet.samples, report.samples) for report in reports),
            0,
            "samples",
        ),
        at_most("samples with tokens of another weight version", sum(r.wrong_version for r in reports), 0, "samples"),
        at_most("widest gap between the reward curves", max(_gap(quiet, r) for r in reports), 0.0, "reward"),
        Result(
            "tokens drawn / tokens kept",
            sum(report.drawn for report in reports) / sum(_kept(report) for report in reports),
            "ratio",
        ),
        Result("quiet run", quiet.wall_s, "s"),
        Result("run with 200 faults, the slowest", max(report.wall_s for report in reports), "s"),
    ]
    return results + [_kind(kind, injected[kind], reports) for kind in KINDS]


def different(quiet: Sequence[Samples], disturbed: Sequence[Samples]) -> int:
    """Samples of the quiet run's steps that are there and differ in any token, log-probability or end."""
    return sum(
        key in after and not _same(sample, after[key])
        for before, after in zip(quiet, disturbed, strict=False)
        for key, sample in before.items()
    )


def _same(one: FinishedSample, other: FinishedSample) -> bool:
    return (one.token_ids, one.logprobs, one.finish) == (other.token_ids, other.logprobs, other.finish)


def _missing(quiet: Report, disturbed: Report) -> int:
    pairs = zip(quiet.samples, disturbed.samples, strict=False)
    return sum(len(before.keys() - after.keys()) for before, after in pairs) + max(
        0, sum(map(len, quiet.samples[len(disturbed.samples) :]))
    )


def _gap(quiet: Report, disturbed: Report) -> float:
    pairs = zip(quiet.rewards, disturbed.rewards, strict=False)
    return max(abs(before - after) for before, after in pairs)


def _kept(report: Report) -> int:
    return sum(len(sample.token_ids) for step in report.samples for sample in step.values())


def _kind(kind: str, count: int, reports: Sequence[Report]) -> Result:
    worst = max((report.recovery_s.get(kind, 0.0) for report in reports), default=0.0)
    note = f"the longest until the machine that was hit drew again: {worst:.2f} s" if worst else ""
    if kind in ("SIGSTOP", "blackhole"):
        note += f"; silence is borne for {3 * HEARTBEAT_S:.1f} s" if note else ""
    return Result(f"- {kind}", count, "faults", note=note)
