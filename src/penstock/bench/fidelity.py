"""Predicted step times against measured ones: a profile is fitted from two runs, and other runs are predicted from it.

The runs are real (loop, manager, agents, sockets) on machines of set speeds. The fit sees three like machines, and two
of them beside a slow and a narrow one. What is predicted differs in the number of machines, their mixture, the lengths
of answers, the size of a step, the speed of training and how much of it needs no whole group, and in machines that are
lost and come within steps. A prediction knows what its user would: which machines there are when, and how long answers
get on average; never a sample's length. With `--quick`, steps are half as large and four settings are left out.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.bench.common import Result, at_most, skipped
from penstock.bench.fidelity_run import KINDS, Measured, Setting, run_setting, small_llama
from penstock.config.train import samples_ahead
from penstock.observe.log import read_events
from penstock.rollout.balanced import Balanced
from penstock.simulate.fit import Fitted, fit_profile
from penstock.simulate.observed import gather
from penstock.simulate.own_run import own_run
from penstock.simulate.profiles import Lengths, Profile
from penstock.simulate.strategy import FixedSize, Strategy
from penstock.simulate.traces import Change, Trace
from penstock.simulate.world import simulate

DESCRIPTION = "predicted step times against measured ones, over settings that the fitted profile has not seen"

TARGET = 0.10
SEEDS = 5
"""Simulations of each setting, whose mean is the prediction."""
QUANTILES = 20

SEEN = (
    Setting("three even", ("even:0", "even:1", "even:2")),
    Setting("two even, slow, narrow", ("even:0", "even:1", "slow:0", "narrow:0")),
)
UNSEEN = (
    Setting("one machine", ("even:0",)),
    Setting("two machines", ("even:0", "even:1")),
    Setting("five machines", tuple(f"even:{k}" for k in range(5))),
    Setting("a fast one among slow ones", ("even:0", "slow:0", "slow:1")),
    Setting("narrow ones", ("narrow:0", "narrow:1", "even:0")),
    Setting("longer answers", ("even:0", "even:1", "even:2"), mean_tokens=180, max_new_tokens=400),
    Setting("shorter answers, larger step", ("even:0", "even:1"), mean_tokens=50, max_new_tokens=120, prompts=48),
    Setting("slow training", ("even:0", "even:1", "even:2"), training_s_per_token=1.2e-4),
    Setting("a part ahead", ("even:0", "even:1", "even:2"), training_s_per_token=1.2e-4, ahead_share=0.4),
    Setting("one of three is lost", ("even:0", "even:1", "even:2"), script=((1.0, "even:2", False),)),
    Setting(
        "lost and replaced, twice",
        ("even:0", "even:1", "even:2"),
        script=(
            (0.6, "even:0", False),
            (1.6, "even:3", True),
            (2.4, "even:1", False),
            (3.2, "even:4", True),
        ),
    ),
    Setting(
        "from two to five to one",
        ("even:0", "even:1"),
        script=(
            (1.0, "even:2", True),
            (1.0, "slow:0", True),
            (1.4, "even:3", True),
            (3.0, "even:0", False),
            (3.0, "even:1", False),
            (3.4, "even:2", False),
            (3.4, "slow:0", False),
        ),
    ),
)

LEFT_OUT = ("one machine", "longer answers", "slow training", "a part ahead")
"""With --quick: those that take longest and are not of unequal or lost machines."""


def run(quick: bool) -> list[Result]:
    steps, seen_steps = (2, 3) if quick else (8, 8)
    unseen = [_smaller(setting) for setting in UNSEEN if setting.name not in LEFT_OUT] if quick else UNSEEN
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small_llama().save_pretrained(folder / "model")
        seen = [_run(_smaller(setting) if quick else setting, seen_steps, folder) for setting in SEEN]
        fitted = _fit([measured.log for measured in seen])
        results = [_residual(fitted), *(_own(setting, measured, fitted) for setting, measured in zip(SEEN, seen))]
        ratios = []
        for setting in unseen:
            measured, predicted_s = _run(setting, steps, folder), predict(fitted, setting, steps)
            ratios.append(predicted_s / measured.step_s)
            results.append(
                at_most(
                    f"{setting.name}: |predicted / measured - 1|",
                    abs(ratios[-1] - 1),
                    TARGET,
                    "share",
                    note=f"predicted {predicted_s:.2f} s a step, measured {measured.step_s:.2f} s over {steps} steps: "
                    f"ratio {ratios[-1]:.3f}",
                )
            )
    within = sum(abs(ratio - 1) <= TARGET for ratio in ratios)
    worst = max(abs(ratio - 1) for ratio in ratios)
    note = f"{within} of {len(ratios)} settings within it"
    return [*results, at_most("worst of all settings: |predicted / measured - 1|", worst, TARGET, "share", note=note)]


def predict(fitted: Fitted, setting: Setting, steps: int) -> float:
    """Mean seconds of a step that the fitted profile leads to."""
    profile = _profile(fitted, setting)
    trace = _trace(fitted, setting)
    found = []
    for seed in range(SEEDS):
        balance, size = Balanced(profile.max_pending_per_instance), FixedSize(len(KINDS) << 10)
        strategy = Strategy("run", balance, None, size, differences=True, looks_ahead=True)
        outcome = simulate(profile, trace, strategy, steps=steps, seed=seed)
        found.append(outcome.wall_s / steps)
    return sum(found) / len(found)


def truncated_quantiles(mean_tokens: int, most: int) -> tuple[float, ...]:
    """Lengths of answers that end with the same chance at every token, cut at `most`."""
    found = []
    for k in range(QUANTILES * 5 + 1):
        left = 1 - k / (QUANTILES * 5)
        length = math.ceil(math.log(left) / math.log1p(-1 / mean_tokens)) if left > 0 else most
        found.append(float(min(most, max(1, length))))
    return tuple(found)


def _smaller(setting: Setting) -> Setting:
    script = tuple((at_s / 2, name, comes) for at_s, name, comes in setting.script)
    return replace(setting, prompts=setting.prompts // 2, script=script)


def _run(setting: Setting, steps: int, folder: Path) -> Measured:
    return run_setting(setting, steps, folder / "model", folder / "runs" / setting.name.replace(" ", "-"))


def _fit(logs: Sequence[Path]) -> Fitted:
    """Of several runs as of one; only settings that all of them share are in their configurations."""
    return fit_profile(gather(event for log in logs for event in read_events(log)))


def _profile(fitted: Fitted, setting: Setting) -> Profile:
    """What the user changes from the runs that were seen to the one that is asked about."""
    base = fitted.profile
    lengths = Lengths(
        prompt_tokens=base.lengths.prompt_tokens,
        max_tokens=setting.max_new_tokens,
        prompt_share=base.lengths.prompt_share,
        quantiles=truncated_quantiles(setting.mean_tokens, setting.max_new_tokens),
    )
    pace = setting.training_s_per_token / SEEN[0].training_s_per_token
    changes = {
        "s_per_token": pace * base.training.s_per_token,
        "ahead_share": setting.ahead_share,
        "ahead_samples": samples_ahead(base.training.micro_batch_samples),
    }
    training = base.training.model_copy(update=changes)
    return base.model_copy(
        update={
            "prompts": setting.prompts,
            "samples_per_prompt": setting.samples_per_prompt,
            "lengths": lengths,
            "training": training,
        }
    )


def _trace(fitted: Fitted, setting: Setting) -> Trace:
    """The setting's machines as nodes of the kinds that the fit found."""
    found = {name.partition(":")[0]: kind for kind, names in fitted.members.items() for name in names}

    def node(name: str) -> str:
        return f"{found[name.partition(':')[0]]}:{name}"

    changes = [Change(0.0, node(name), True) for name in setting.machines]
    changes += [Change(at_s, node(name), comes) for at_s, name, comes in setting.script]
    return Trace(tuple(changes), math.inf)


def _own(setting: Setting, measured: Measured, fitted: Fitted) -> Result:
    """A fit that does not explain the runs that it was made from is not worth asking."""
    what = f"fitted on, {setting.name}: |predicted / measured - 1|"
    own = own_run(gather(read_events(measured.log)), fitted)
    if own is None:
        return skipped(what, "share", "its log names no machines")
    return at_most(what, abs(own.off), TARGET, "share", own.words)


def _residual(fitted: Fitted) -> Result:
    worst = max(fitted.residuals.values(), key=lambda solution: solution.median_residual)
    kinds = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in fitted.members.items())
    return Result("fit: median residual of the worst kind of machine", worst.median_residual, "share", note=kinds)
