"""A profile from a run's event log: each number by robust least squares or as a median, with how well it fits.

    wall_s = step_base_s * steps + sequence_s * tokens + context_s * (context summed over steps) + prefill * prefilled

is linear in the four unknowns and stays so when rows are summed up, which is what the log's rows are. Instances
with other places, or whose speed differs by more than `LIKE`, become a kind of their own.

Decides what is too little to be fitted (`ConfigError` names all that is missing), what does not explain its own rows,
and what is said of numbers that the run leaves open. Refuses to know prices: no log has them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config.train import samples_ahead
from penstock.errors import ConfigError
from penstock.simulate.least_squares import Prior, Solution, robust_fit
from penstock.simulate.lengths import spread_of
from penstock.simulate.observed import LoadRow, Observed, WorkRow
from penstock.simulate.profiles import Lengths, MachineProfile, Prices, Profile, Training
from penstock.weights.choose import DRAFT_PARTS

__all__ = ["Fitted", "fit_profile"]

LEAST_ROWS = 6
LEAST_BUSY_S = 5.0
LEAST_STEPS = 2
VARIETY = 1.5
"""Largest over smallest batch size below which what a step costs alone can't be told from what a sequence costs."""
LIKE = 0.1
"""Instances whose speeds differ by less are of one kind: a tenth is what a run's noise can look like."""
UNEXPLAINED = 0.1
"""Median residual beyond which a fit does not explain its own rows."""
NEVER_FULL = 1 << 40
MOST_AHEAD = 0.9
"""Of training: gradients need whole groups."""
PREFILL = 3
"""Its place among the unknowns."""


@dataclass
class Fitted:
    """`residuals`: by kind of machine, how far the rows are from the fit. `notes`: what the run leaves open."""

    profile: Profile
    residuals: dict[str, Solution] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    """Names of the instances of each kind."""
    notes: list[str] = field(default_factory=list)


def fit_profile(seen: Observed, prices: Prices | None = None) -> Fitted:
    """Raises ConfigError that says what is missing where the run has too little to go by."""
    _enough(seen)
    notes: list[str] = []
    kinds = _kinds(seen.rows)
    priors = _priors(kinds)
    fits = {name: _machine(rows, priors[name], seen, notes, name) for name, rows in kinds.items()}
    names = {name: sorted({row.name for row in rows}) for name, rows in kinds.items()}
    reserved = [name for name, rows in kinds.items() if rows[0].reserved]
    remote = [name for name, rows in kinds.items() if not rows[0].reserved]
    if not remote:
        notes.append("no remote instance worked in this run: spot machines are taken to be like its reserved ones")
    if not reserved:
        notes.append("no reserved engine worked in this run: the profile has none; any would be like its remote ones")
    beside = bool(reserved) and seen.config["rollout"].get("window", "off") == "off"
    if beside:
        notes.append(
            'its reserved engines generated beside the trainer (rollout.window = "off"), and do so in this profile. '
            "Speeds are those that the two had beside each other: what turns would give can't be told from this run"
        )
    spot, own = (remote or reserved)[0], (reserved or remote)[0]
    config = seen.config
    rollout, train = config["rollout"], config["train"]
    profile = Profile(
        name=seen.run or "fitted",
        prompts=rollout["prompts_per_step"],
        samples_per_prompt=rollout["samples_per_prompt"],
        weights_gb=max(seen.versions.values(), default=0) / 1e9,
        difference_gb=_difference(seen)[0],
        store_gbit_s=_store_gbit_s(seen, notes),
        reserved_instances=len(seen.reserved),
        reserved_beside=beside,
        reserved=fits[own][0],
        spot=fits[spot][0],
        kinds={name: fits[name][0] for name in remote[1:]},
        training=_training(seen, train),
        prices=prices or Prices(reserved=0.0, spot=0.0, on_demand=0.0),
        lengths=_lengths(seen, rollout),
        **{key: rollout[key] for key in ("max_pending_per_instance", "heartbeat_s") if key in rollout},
    )
    if prices is None:
        notes.append("prices are not in a run's log and stand at 0: fill in [prices] before asking for dollars")
    return Fitted(profile, {name: fit[1] for name, fit in fits.items()}, names, notes)


def _enough(seen: Observed) -> None:
    busy_s = sum(row.work.wall_s for row in seen.rows)
    missing = []
    if not {"rollout", "train"} <= seen.config.keys():
        missing.append("the run's configuration (event run_started)")
    if len(seen.rows) < LEAST_ROWS or busy_s < LEAST_BUSY_S:
        missing.append(
            f"work of instances (event instance_worked): {len(seen.rows)} rows over {busy_s:.1f} s, "
            f"{LEAST_ROWS} over {LEAST_BUSY_S:g} s are needed"
        )
    if len(seen.steps) < LEAST_STEPS:
        missing.append(f"finished steps (event step_finished): {len(seen.steps)}, {LEAST_STEPS} are needed")
    if not seen.answers:
        missing.append("lengths of answers (event answers_ended of a training batch)")
    if missing:
        raise ConfigError("too little in this run to fit a profile; missing: " + "; ".join(missing))


# ---- machines


def _kinds(rows: Sequence[WorkRow]) -> dict[str, list[WorkRow]]:
    """Rows by kind of machine: reserved and remote apart, then by places and speed, the kind with most work first."""
    found: dict[str, list[WorkRow]] = {}
    for reserved in (False, True):
        part = [row for row in rows if row.reserved is reserved]
        if not part:
            continue
        places = {row.name: row.max_running for row in part}
        sizes = sorted(set(places.values()))
        groups = [group for size in sizes for group in _alike([row for row in part if places[row.name] == size])]
        groups.sort(key=lambda group: -sum(row.work.wall_s for row in group))
        for k, group in enumerate(groups):
            base = "reserved" if reserved else "spot"
            # What stands before a colon is what several instances have in common, as in a trace.
            first = min(row.name for row in group).partition(":")[0]
            name = base if k == 0 else f"{base}-{first}"
            found[name if name not in found else f"{name}-{k}"] = group
    return found


def _alike(rows: Sequence[WorkRow]) -> list[list[WorkRow]]:
    """Rows grouped by their instances' speeds, cut where neighbours in order of speed are further apart than `LIKE`."""
    whole = _solve(rows)
    slowness: dict[str, float] = {}
    for name in {row.name for row in rows}:
        own = [row for row in rows if row.name == name]
        slowness[name] = _slowness(own, whole)
    ordered = sorted(slowness, key=lambda name: slowness[name])
    groups: list[list[str]] = [[ordered[0]]]
    for before, name in itertools.pairwise(ordered):
        if slowness[name] > slowness[before] * (1 + LIKE):
            groups.append([])
        groups[-1].append(name)
    return [[row for row in rows if row.name in group] for group in groups]


def _priors(kinds: Mapping[str, Sequence[WorkRow]]) -> dict[str, dict[int, Prior]]:
    """What each kind is like as far as its own rows don't tell: all machines together, as much slower as it is, to
    within as much again. Most prefill comes to machines that begin, and is in no row: a kind may have a single row with
    16 tokens of it, to which any stall could be put down."""
    rows = [row for part in kinds.values() for row in part]
    # A token costs less when it comes with others of its prompt than when it is drawn.
    drawn_s = sum(row.work.wall_s for row in rows) / max(1, sum(row.work.tokens for row in rows))
    prefill = {PREFILL: Prior(0.0, drawn_s)}
    whole = _solve(rows, prefill)
    slowness = {name: _slowness(part, whole) for name, part in kinds.items()}
    scaled = [slowness[name] for name, part in kinds.items() for _ in part]
    values = _solve(rows, prefill, scaled).values
    return {
        name: {k: Prior(slow * value, slow * value) for k, value in enumerate(values) if value > 0}
        for name, slow in slowness.items()
    }


def _machine(
    rows: Sequence[WorkRow], priors: Mapping[int, Prior], seen: Observed, notes: list[str], kind: str
) -> tuple[MachineProfile, Solution]:
    solution = _solve(rows, priors)
    if solution.median_residual > UNEXPLAINED:
        notes.append(
            f"{kind}: WARNING: its rows are off by {solution.median_residual:.0%} in the middle, more than "
            f"{UNEXPLAINED:.0%}: the run was disturbed, or its instances were not of one kind; don't rely on this fit"
        )
    base, sequence, context, prefill = solution.values
    sizes = [row.work.tokens / row.work.steps for row in rows if row.work.steps > 0]
    if max(sizes) < VARIETY * min(sizes):
        notes.append(
            f"{kind}: its batches were always about {statistics.median(sizes):.0f} sequences, so what a decode step "
            "costs alone is not told from what a sequence costs; predictions hold for such batches only"
        )
    return (
        MachineProfile(
            step_base_s=max(base, 1e-9),
            sequence_s=sequence,
            context_s=context,
            prefill_s_per_token=prefill,
            max_running=max(row.max_running for row in rows),
            kv_tokens=_memory(rows, notes, kind),
            link_gbit_s=_link_gbit_s(seen),
            apply_s=_difference(seen)[1],
            boot_s=statistics.median(seen.starts_s) if seen.starts_s else 0.0,
        ),
        solution,
    )


def _memory(rows: Sequence[WorkRow], notes: list[str], kind: str) -> int:
    """Tokens of context that fit. An instance that held far more at another time was not full when it looked so."""
    most = max(row.work.most_context for row in rows)
    full = max((row.work.most_context for row in rows if row.work.full), default=0)
    if not full:
        return NEVER_FULL
    if full < (1 - LIKE) * most:
        notes.append(f"{kind}: seemed full at {full} tokens of context and held {most}: its memory is not known")
        return NEVER_FULL
    return most


def _slowness(rows: Sequence[WorkRow], whole: Solution) -> float:
    """Seconds that some rows took, over those that a solution of all says."""
    predicted = sum(_dot(whole.values, row) for row in rows)
    return sum(row.work.wall_s for row in rows) / max(predicted, 1e-12)


def _solve(
    rows: Sequence[WorkRow], priors: Mapping[int, Prior] | None = None, slowness: Sequence[float] | None = None
) -> Solution:
    """`slowness`: of each row's machine, beside the one that is solved for."""
    import numpy as np

    design = np.array([[r.work.steps, r.work.tokens, r.work.context_steps, r.work.prefilled] for r in rows], float)
    if slowness is not None:
        design *= np.array(slowness)[:, None]
    walls = np.array([row.work.wall_s for row in rows])
    # A row of a minute says as much as sixty of a second.
    return robust_fit(design, walls, walls, priors)


def _dot(values: Sequence[float], row: WorkRow) -> float:
    work = row.work
    return sum(v * x for v, x in zip(values, (work.steps, work.tokens, work.context_steps, work.prefilled)))


# ---- weights


def _apart(seen: Observed) -> tuple[list[LoadRow], list[LoadRow]]:
    """(whole versions, differences), where the run had both and differences came sooner; else all count as whole."""
    known = [row for row in seen.loads if seen.versions.get(row.version)]
    whole = [row for row in known if not row.difference]
    differences = [row for row in known if row.difference]
    if not (whole and differences) or _median_s(differences) >= _median_s(whole):
        return [*whole, *differences], []
    return whole, differences


def _median_s(loads: Sequence[LoadRow]) -> float:
    return statistics.median(row.wall_s for row in loads)


def _link_gbit_s(seen: Observed) -> float:
    """Of one pull, as fast as the run's went: whole versions over seconds, however little of them was fetched."""
    rates = [8e-9 * seen.versions[row.version] / row.wall_s for row in _apart(seen)[0]]
    return max(1e-6, statistics.median(rates)) if rates else 1e6


def _difference(seen: Observed) -> tuple[float | None, float]:
    """(size in GB, seconds to apply one): with these a pull of one takes as long as the run's did, its encoding
    included. None where whole versions alone can be told."""
    differences = _apart(seen)[1]
    if not differences:
        return None, 0.0
    fetched_gb = statistics.median(row.fetched_bytes for row in differences) / 1e9
    wire_s, wall_s = 8 * fetched_gb / _link_gbit_s(seen), _median_s(differences)
    # The longer of the two, and a part of the other.
    apply_s = wall_s - wire_s / DRAFT_PARTS
    return fetched_gb, apply_s if apply_s >= wire_s else max(0.0, DRAFT_PARTS * (wall_s - wire_s))


def _store_gbit_s(seen: Observed, notes: list[str]) -> float:
    """What all pulls of a version had together, at least."""
    by_version: dict[int, list[float]] = {}
    for row in _apart(seen)[0]:
        by_version.setdefault(row.version, []).append(row.wall_s)
    rates = [8e-9 * seen.versions[version] * len(walls) / max(walls) for version, walls in by_version.items()]
    if not rates:
        notes.append("no weights were pulled in this run: pulls are taken to cost nothing")
        return 1e6
    return max(1e-6, max(rates))


# ---- training and answers


def _training(seen: Observed, train: Mapping[str, Any]) -> Training:
    """Seconds for a token, and what a step has besides training and waiting: optimizer, publishing, records."""
    per_token, rest_s = [], []
    prompt_tokens = statistics.fmean(answers.prompt_tokens for answers in seen.answers)
    for metrics in seen.steps[1:] or seen.steps:
        tokens = metrics["response_tokens"] + metrics["samples"] * prompt_tokens
        per_token.append(metrics["train_s"] / max(1.0, tokens))
        rest_s.append(max(0.0, metrics["step_s"] - metrics["train_s"] - metrics["trainer_wait_s"]))
    ahead_tokens = sum(metrics.get("ahead_tokens", 0.0) for metrics in seen.steps)
    ahead_s = sum(metrics.get("ahead_s", 0.0) for metrics in seen.steps)
    s_per_token = statistics.median(per_token)
    # What was never done ahead costs nobody a wait that it could spare.
    ahead = min(MOST_AHEAD, ahead_s / ahead_tokens / s_per_token) if ahead_tokens and s_per_token else 0.0
    rewards = [metrics["reward_s_mean"] for metrics in seen.steps if "reward_s_mean" in metrics]
    return Training(
        s_per_token=s_per_token,
        ahead_share=ahead,
        ahead_samples=samples_ahead(train["min_samples_per_micro_batch"]),
        optimizer_s=statistics.median(rest_s),
        micro_batch_samples=train["min_samples_per_micro_batch"],
        reward_s=statistics.median(rewards) if rewards else 0.0,
    )


def _lengths(seen: Observed, rollout: Mapping[str, Any]) -> Lengths:
    """Quantiles averaged over steps, and the median's growth where there is one beyond its error."""
    steps = seen.answers
    middle = len(steps[0].quantiles) // 2
    medians = [max(1.0, answers.quantiles[middle]) for answers in steps]
    growth = max(0.0, _growth(medians))
    # As they were at the first step; the simulation lets them grow from there.
    shrunk = (1 + growth) ** (-(len(steps) - 1) / 2)
    quantiles = [
        max(1.0, shrunk * statistics.fmean(answers.quantiles[k] for answers in steps))
        for k in range(len(steps[0].quantiles))
    ]
    return Lengths(
        prompt_tokens=max(1, round(statistics.fmean(answers.prompt_tokens for answers in steps))),
        median_tokens=quantiles[middle],
        spread=spread_of(quantiles),
        prompt_share=min(1.0, statistics.fmean(answers.prompt_share for answers in steps)),
        max_tokens=rollout["sampling"]["max_new_tokens"],
        growth_per_step=growth,
        quantiles=tuple(quantiles),
    )


def _growth(medians: Sequence[float]) -> float:
    """Least-squares slope of the logarithm; 0 where it is less than twice its standard error, or there are too few."""
    count = len(medians)
    if count < 4:
        return 0.0
    logs = [math.log(median) for median in medians]
    mean_x, mean_y = (count - 1) / 2, statistics.fmean(logs)
    spread = sum((k - mean_x) ** 2 for k in range(count))
    slope = sum((k - mean_x) * (y - mean_y) for k, y in enumerate(logs)) / spread
    left = sum((y - mean_y - slope * (k - mean_x)) ** 2 for k, y in enumerate(logs))
    error = math.sqrt(left / (count - 2) / spread)
    return math.expm1(slope) if slope > 2 * error else 0.0
