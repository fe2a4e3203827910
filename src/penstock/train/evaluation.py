"""What held-out answers come to: accuracy and pass@k, of each set by its name and of all of them.

Decides what counts as solved (a score of 1 or more) and what is known of a question. An answer without a score is
missing and counted as such, never as wrong. Pure; refuses to know how answers come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.observe.events import EvaluatedSet
from penstock.sample import Group, Prompt
from penstock.train.tally import value_of

__all__ = ["Results", "evaluate", "pass_at_k"]


class Results(NamedTuple):
    whole: EvaluatedSet | None
    """Over all questions; None where no answer at all has a score."""
    sets: dict[str, EvaluatedSet]
    """Of each set with an answer that has a score."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Chance that one of `k` of a question's `samples` answers, `solved` of them right, is right.

    The unbiased estimator 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). `k` is at most
    `samples`.
    """
    if not 0 <= solved <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} answers, {solved} right")
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def evaluate(
    groups: Iterable[Group],
    prompts: Sequence[Prompt],
    set_names: Mapping[int, str],
    samples_per_prompt: int,
    ks: Sequence[int],
) -> Results:
    """`groups` hold the answers with a score; `prompts` were asked, each `samples_per_prompt` times.

    `set_names`: of prompts, by index; those without one count for the whole alone. Of `ks` those up to
    `samples_per_prompt` are reported.
    """
    solved = {
        group.prompt.index: (len(group.samples), sum(value_of(sample) >= 1.0 for sample in group.samples))
        for group in groups
        if group.samples
    }
    wanted = sorted({k for k in ks if k <= samples_per_prompt})
    indices = [prompt.index for prompt in prompts]
    of_sets: dict[str, list[int]] = {}
    for index in indices:
        if index in set_names:
            of_sets.setdefault(set_names[index], []).append(index)
    sets = {name: _result(members, solved, samples_per_prompt, wanted) for name, members in of_sets.items()}
    return Results(
        _result(indices, solved, samples_per_prompt, wanted),
        {name: result for name, result in sets.items() if result is not None},
    )


def _result(
    asked: Sequence[int], solved: Mapping[int, tuple[int, int]], samples_per_prompt: int, ks: Sequence[int]
) -> EvaluatedSet | None:
    known = [solved[index] for index in asked if index in solved]
    if not known:
        return None
    enough = {k: [(samples, right) for samples, right in known if samples >= k] for k in ks}
    return EvaluatedSet(
        accuracy=math.fsum(right / samples for samples, right in known) / len(known),
        questions=len(known),
        asked=len(asked),
        unscored=len(asked) * samples_per_prompt - sum(samples for samples, _ in known),
        pass_at={
            k: math.fsum(pass_at_k(samples, right, k) for samples, right in rows) / len(rows)
            for k, rows in enough.items()
            if rows
        },
        short={k: len(asked) - len(rows) for k, rows in enough.items() if len(rows) < len(asked)},
    )
