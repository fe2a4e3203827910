"""What the policies are worth on spot traces: simulated against colocated training and RLBoost's own algorithms.

Three windows of two hours with the most changes in `p3-trace.csv`, half of its machines; three models. The fleet is
bounded for RLBoost and for Penstock alike by what the paper's two figures for each model imply: a throughput of 1.66 x
at 34 % more tokens a dollar has cost 1.24 x as much an hour, which is 3.8 spot machines (8B); likewise 5.1 and 2.8.
`numbers` is the same without that bound: each strategy asks for as many as its own policy finds worth having, of all
that the trace has. `static` fleets never change; in `unequal` ones some of the machines are slower in all they do.

RLBoost is taken with the constants, of those tried on the very windows, that are best for it. Its paper's ablations and
ours (each of our policies switched off) are rows of the 14B model. Disaggregated training on machines on demand has the
number of them with the most tokens per dollar; it is reported beside, and has no target.

The traces are not part of the package: PENSTOCK_SPOT_TRACES names their folder.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from penstock.bench.common import Result, at_least, at_most, progress, skipped
from penstock.simulate.baselines import ABLATIONS, Tuning, make_strategy, tuned
from penstock.simulate.bound import least_run_s
from penstock.simulate.lengths import step_samples
from penstock.simulate.outcome import Outcome
from penstock.simulate.profiles import Profile, shipped
from penstock.simulate.traces import Trace, read_trace, static_trace
from penstock.simulate.tune import tune
from penstock.simulate.world import simulate

DESCRIPTION = "simulated on spot traces: throughput, tokens per dollar and regret against colocated and RLBoost"

WINDOW_S = 7200.0
MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
FLEETS = {"qwen3-8b": 4, "qwen3-14b": 5, "qwen3-32b": 3}
PAPER = {"qwen3-8b": (1.66, 1.34), "qwen3-14b": (1.97, 1.49), "qwen3-32b": (1.51, 1.28)}
TARGETS = {"qwen3-8b": (1.75, 1.40), "qwen3-14b": (2.05, 1.55), "qwen3-32b": (1.60, 1.35)}
ABLATED = "qwen3-14b"
"""The paper's ablations are of this model."""
SEEDS = 3
"""Of lengths and of who is taken away, on each trace in the folder."""
ENOUGH_STEPS = 3
"""A window in which fewer steps end says more about where it was cut than about a policy."""


ORDERS = ("ffff" + 12 * "s", 8 * "fs", "ssss" + 12 * "f")
"""Of fast and slow machines, as they are taken."""
SLOW_PRICE = 0.4
"""Of a fast machine's, for one that is slower by 2: cheaper by what both decode, and dearer by what a step gains."""
NUMBERED_STEPS = 16
MOST_CHANGES = 4
"""Up at first, down once speeds are known, and one try in between."""

NUMBERS = {f"numbers-{model.removeprefix('qwen3-')}": model for model in MODELS}
PARTS = (*MODELS, *NUMBERS, "ablations", "traces", "static", "unequal")
"""Each takes minutes, and can be run alone."""


def run(quick: bool) -> list[Result]:
    return [result for part in PARTS for result in run_part(part, quick)]


def run_part(part: str, quick: bool) -> list[Result]:
    """One of `PARTS`; a quick run leaves the longest ones out."""
    if part == "static":
        return _static(quick)
    if part == "unequal":
        return _unequal(quick)
    if quick and part in (MODELS[-1], *list(NUMBERS)[1:], "traces"):
        return []
    folder = Path(os.environ.get("PENSTOCK_SPOT_TRACES", ""))
    p3 = folder / "bamboo" / "p3-trace.csv"
    if folder == Path() or not p3.exists():
        why = "PENSTOCK_SPOT_TRACES names no folder with bamboo/p3-trace.csv"
        return [skipped(f"{part}: throughput and tokens per dollar on spot traces", "x", why)]
    if part == "traces":
        return _everywhere(folder)
    half = read_trace(p3).sampled(0.5)
    windows = [half.window(start, WINDOW_S) for start in half.densest(1 if quick else 3, WINDOW_S)]
    if part == "ablations":
        return _ablations(shipped(ABLATED), windows)
    if part in NUMBERS:
        profile, most = shipped(NUMBERS[part]), _most(windows)
        own = _dense(profile, windows, quick, most, f"{profile.name}, any number of machines")
        return [*own, _all_there(profile, windows, most)]
    profile = shipped(part)
    return [*_dense(profile, windows, quick, FLEETS[part], profile.name), _apart(profile, windows)]


def _most(windows: list[Trace]) -> int:
    """Machines that are there at once, at most: a ceiling that bounds nobody."""
    return max(len(window.available(change.at_s)) for window in windows for change in window.changes)


def _dense(profile: Profile, windows: list[Trace], quick: bool, ceiling: int, name: str) -> list[Result]:
    """One model on the densest windows, with so many spot machines at most: totals over them."""

    def total(strategy: str, tuning: Tuning | None = None) -> _Total:
        return _Total.of(profile, strategy, windows, ceiling, tuning)

    base, untuned, ours = (total(strategy) for strategy in ("colocated", "rlboost", "penstock"))

    def reached(tried: Tuning) -> float:
        found = total("rlboost", tried).tokens_per_s
        progress(f"{name}: RLBoost with {asdict(tried)}: {found / base.tokens_per_s:.3f} x")
        return found

    tuning = Tuning() if quick else tuned(reached)

    def gain(one: _Total) -> float:
        return one.tokens_per_s / base.tokens_per_s

    paper = total("rlboost", tuning)
    constants = ", ".join(f"{key} {value:g}" for key, value in asdict(tuning).items())
    speed, money = TARGETS[profile.name]
    paper_speed, paper_money = PAPER[profile.name]
    # The same steps, each begun where the last one's bound ends, with all machines up to the fleet's size.
    least_s = sum(
        least_run_s(profile, window, ceiling, lambda step: step_samples(profile, step, 0), len(outcome.steps))
        for window, outcome in zip(windows, ours.outcomes)
    )
    near_bound = least_s / ours.wall_s
    at_bound = f"no policy passes {gain(ours) / near_bound:.2f} x on these machines (clairvoyant bound)"
    bound = "Penstock / the clairvoyant bound, throughput"
    results = [
        Result(
            f"{name}: RLBoost / colocated, throughput",
            gain(paper),
            "x",
            note=f"paper {paper_speed}; {untuned.tokens_per_s / base.tokens_per_s:.2f} with its code's constants; "
            f"tuned: {constants}",
        ),
        Result(
            f"{name}: RLBoost / colocated, tokens per dollar",
            paper.per_dollar / base.per_dollar,
            "x",
            note=f"paper {paper_money}; {paper.asked:.1f} machines asked for",
        ),
        at_least(f"{name}: Penstock / colocated, throughput", gain(ours), speed, "x", note=at_bound),
        at_least(
            f"{name}: Penstock / colocated, tokens per dollar",
            ours.per_dollar / base.per_dollar,
            money,
            "x",
            note=f"{ours.asked:.1f} machines asked for",
        ),
        at_least(
            f"{name}: Penstock / RLBoost, throughput",
            same_work(ours.outcomes, paper.outcomes),
            1.10,
            "x",
            note=f"{ours.tokens_per_s / paper.tokens_per_s:.3f} if each one's own steps count",
        ),
        Result(f"{name}: Penstock / RLBoost, tokens per dollar", ours.per_dollar / paper.per_dollar, "x"),
        Result(f"{name}: trainer waits, Penstock", ours.wait_share, "share", note=f"RLBoost {paper.wait_share:.2f}"),
    ]
    if gain(ours) < speed:
        # Where the target can't be had, the bound takes its place.
        return [*results, at_least(f"{name}: {bound}", near_bound, 0.95, "x")]
    return [*results, Result(f"{name}: {bound}", near_bound, "x")]


def _all_there(profile: Profile, windows: list[Trace], most: int) -> Result:
    """Whatever it costs."""
    base = _Total.of(profile, "colocated", windows)
    paper, ours = (_Total.of(profile, name, windows, machines=most) for name in ("rlboost", "penstock"))
    speeds = " and ".join(f"{one.tokens_per_s / base.tokens_per_s:.2f}" for one in (ours, paper))
    money = " and ".join(f"{one.per_dollar / base.per_dollar:.2f}" for one in (ours, paper))
    return Result(
        f"{profile.name}, all machines that are there: Penstock / RLBoost, throughput",
        same_work(ours.outcomes, paper.outcomes),
        "x",
        note=f"{speeds} x colocated, {money} x its tokens per dollar; RLBoost with its code's constants",
    )


def _apart(profile: Profile, windows: list[Trace]) -> Result:
    """Disaggregated training, which has no target. Its machines are never taken away, and no window changes their
    number."""
    base = _Total.of(profile, "colocated", windows)
    on_demand = tune("disaggregated", profile, windows[0])
    apart = _Total.of(profile, "disaggregated", windows, machines=on_demand.machines)
    return Result(
        f"{profile.name}: disaggregated / colocated, throughput",
        apart.tokens_per_s / base.tokens_per_s,
        "x",
        note=f"{on_demand.words}, the most tokens per dollar: {apart.per_dollar / base.per_dollar:.2f} x",
    )


def _ablations(profile: Profile, windows: list[Trace]) -> list[Result]:
    """What each part is worth: throughput without it over throughput with it."""
    fleet = FLEETS[profile.name]

    def reached(name: str) -> float:
        progress(f"{profile.name}: {name}")
        return _Total.of(profile, name, windows, fleet).tokens_per_s

    whole = {name: reached(name) for name in ("rlboost", "penstock")}
    notes = {"rlboost-no-seeding": "paper -19 %", "rlboost-forgetful": "paper -6 %, of its memory"}
    return [
        Result(
            f"{profile.name}: {name} / {base}, throughput", reached(name) / whole[base], "x", note=notes.get(name, "")
        )
        for name in (*notes, *ABLATIONS)
        for base in (name.partition("-")[0],)
    ]


def _everywhere(folder: Path) -> list[Result]:
    """The worst seed of every trace in the folder, each on the two hours in which most changes."""
    profile = shipped("qwen3-8b")
    results = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in (".csv", ".txt", ".json"):
            continue
        ratios: dict[int, float] = {}
        dollars: list[float] = []
        for seed in range(SEEDS):
            trace = read_trace(path, seed)
            window = trace.window(trace.densest(1, WINDOW_S)[0], WINDOW_S)
            ours, paper = (_on(profile, name, window, 8, seed=seed) for name in ("penstock", "rlboost"))
            if min(len(ours.steps), len(paper.steps)) < ENOUGH_STEPS:
                continue
            ratios[seed] = same_work([ours], [paper])
            dollars.append(ours.tokens_per_dollar / paper.tokens_per_dollar)
            progress(f"{path.name}, seed {seed}: {ratios[seed]:.4f} x, {dollars[-1]:.3f} x the tokens per dollar")
        what = f"{path.name}: Penstock / RLBoost, throughput, 8B"
        if not ratios:
            results.append(skipped(what, "x", f"fewer than {ENOUGH_STEPS} steps end", ">= 1"))
            continue
        note = f"worst of seeds {', '.join(map(str, ratios))}; {min(dollars):.3f} x the tokens per dollar at least"
        results.append(at_least(what, min(ratios.values()), 1.0, "x", note=note))
    return results


def _static(quick: bool) -> list[Result]:
    """Fleets that never change."""
    steps = 6 if quick else 10
    regrets: list[float] = []
    ratios: list[float] = []
    results: list[Result] = []
    for model in MODELS[:1] if quick else MODELS:
        profile = shipped(model)
        for machines in (2, FLEETS[model], 8):
            trace = static_trace(machines, 1e9)
            ours, paper = (
                simulate(profile, trace, make_strategy(name, profile, machines=machines), steps=steps)
                for name in ("penstock", "rlboost")
            )
            regrets.append(ours.regret)
            ratios.append(same_work([ours], [paper]))
            progress(f"{model}, {machines} machines: regret {regrets[-1]:.3f}, {ratios[-1]:.3f} x RLBoost")
    note = "the bound knows every length; " + ", ".join(f"{regret:.2f}" for regret in regrets)
    results.append(at_most("mean regret on static fleets", sum(regrets) / len(regrets), 0.10, "share", note=note))
    results.append(at_least("worst static fleet: Penstock / RLBoost, throughput", min(ratios), 1.0, "x"))
    return results


def _unequal(quick: bool) -> list[Result]:
    """Fleets of fast and slow machines, that never change: against RLBoost, and against the fast ones alone."""
    ratios: list[float] = []
    gains: list[float] = []
    for model in MODELS[:1] if quick else MODELS[::2]:
        for prompts, (fast, slow), factor in itertools.product((128, 32), ((4, 4), (1, 3)), (2.0, 4.0)):
            usual = shipped(model).model_copy(update={"prompts": prompts})
            profile = usual.model_copy(update={"kinds": {"slow": usual.spot.slower_by(factor)}})
            nodes = [f"fast:{k}" for k in range(fast)] + [f"slow:{k}" for k in range(slow)]

            def run(strategy: str, nodes: list[str], profile: Profile = profile) -> Outcome:
                trace = static_trace(nodes, 1e9)
                return simulate(profile, trace, make_strategy(strategy, profile, machines=len(nodes)), steps=6)

            ours, paper, alone = run("penstock", nodes), run("rlboost", nodes), run("penstock", nodes[:fast])
            ratios.append(same_work([ours], [paper]))
            # In a run's first step nobody's speed is known.
            gains.append(_later_s(alone) / _later_s(ours))
            what = f"{model}, {prompts} prompts, {fast} machines and {slow} slower by {factor:g}"
            progress(f"{what}: {gains[-1]:.3f} x the fast ones alone, {ratios[-1]:.3f} x RLBoost")
    note = "of each: " + ", ".join(f"{gain:.3f}" for gain in gains)
    return [
        *_unequal_numbers(quick),
        at_least("unequal fleets, mean: Penstock / its fast machines alone, throughput", fmean(gains), 1.0, "x", note),
        at_least("the worst of them", min(gains), 1.0, "x"),
        at_least("worst unequal fleet: Penstock / RLBoost, throughput", min(ratios), 1.0, "x"),
    ]


def _unequal_numbers(quick: bool) -> list[Result]:
    """The number of machines that is asked for where those that come are of two speeds: whether it stands still."""
    usual = shipped(MODELS[0])
    return [
        _numbered(usual, usual.prices.spot, quick, "unequal fleets"),
        _numbered(usual, SLOW_PRICE * usual.prices.spot, quick, "unequal fleets and prices"),
    ]


def _numbered(usual: Profile, slow_price: float, quick: bool, name: str) -> Result:
    prices = usual.prices.model_copy(update={"kinds": {"slow": slow_price}})
    profile = usual.model_copy(update={"kinds": {"slow": usual.spot.slower_by(2.0)}, "prices": prices})
    changes: list[int] = []
    notes: list[str] = []
    for order in ORDERS[:1] if quick else ORDERS:
        nodes = [f"{'fast' if kind == 'f' else 'slow'}:{k}" for k, kind in enumerate(order)]
        strategy = make_strategy("penstock", profile, ceiling=len(nodes))
        outcome = simulate(profile, static_trace(nodes, 1e9), strategy, steps=NUMBERED_STEPS)
        asked = [asked.wanted for asked in outcome.asked]
        changes.append(sum(one != other for one, other in itertools.pairwise(asked)))
        notes.append(f"{changes[-1]} with {outcome.tokens_per_dollar:,.0f} tokens per dollar")
        progress(f"{profile.name}, {name}, {order}: {asked}, {notes[-1]}")
    what = f"{name}, any number of machines: changes of the number in {NUMBERED_STEPS} steps, at most"
    return at_most(what, max(changes), MOST_CHANGES, "changes", note="of each: " + ", ".join(notes))


def _later_s(outcome: Outcome) -> float:
    return fmean(step.times.step_s for step in outcome.steps[1:])


def _on(
    profile: Profile,
    name: str,
    window: Trace,
    ceiling: int = 0,
    tuning: Tuning | None = None,
    seed: int = 0,
    machines: int | None = None,
) -> Outcome:
    """`machines` fixes the number of remote ones, and else `ceiling` bounds it."""
    strategy = make_strategy(name, profile, machines=machines, ceiling=ceiling, tuning=tuning)
    return simulate(profile, window, strategy, duration_s=WINDOW_S, seed=seed)


def same_work(ours: Sequence[Outcome], others: Sequence[Outcome]) -> float:
    """Throughput of one against another over the steps that both ended: the n-th step has the same samples in both.

    Else whoever gets further would be judged by a stretch of the trace that the other never came to.
    """
    ours_s = others_s = 0.0
    for one, other in zip(ours, others, strict=True):
        both = min(len(one.steps), len(other.steps))
        ours_s += sum(step.times.step_s for step in one.steps[:both])
        others_s += sum(step.times.step_s for step in other.steps[:both])
    return others_s / ours_s


class _Total:
    """Several runs of one strategy as one."""

    @classmethod
    def of(
        cls,
        profile: Profile,
        name: str,
        windows: list[Trace],
        ceiling: int = 0,
        tuning: Tuning | None = None,
        machines: int | None = None,
    ) -> _Total:
        """A run on each window."""
        runs = [_on(profile, name, window, ceiling, tuning, machines=machines) for window in windows]
        return cls(runs)

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        tokens = self._sum(outcomes, lambda outcome: [float(step.tokens) for step in outcome.steps])
        wall_s = self._sum(outcomes, lambda outcome: [step.times.step_s for step in outcome.steps])
        self.wall_s, self.tokens_per_s = wall_s, tokens / wall_s
        self.per_dollar = tokens / sum(outcome.dollars for outcome in outcomes)
        self.asked = fmean(outcome.mean_asked for outcome in outcomes)
        self.wait_share = (
            self._sum(outcomes, lambda outcome: [step.times.trainer_wait_s for step in outcome.steps]) / wall_s
        )

    @staticmethod
    def _sum(outcomes: list[Outcome], values: Callable[[Outcome], list[float]]) -> float:
        return sum(sum(values(outcome)) for outcome in outcomes)
