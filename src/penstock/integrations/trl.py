"""TRL's reward functions: `GRPOTrainer(reward_funcs=reward_function(f))`.

Decides how a batch of prompts, completions and columns becomes samples; a sample without a score is `None`, TRL's own
word for it. Runs without TRL.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.integrations.common import Rewards, plain, sample_of, text_of
from penstock.sample import Sample, SampleId, Score, Unscored

__all__ = ["reward_function"]

TRAINERS_OWN = ("trainer_state", "log_extra", "log_metric", "environments", "completion_ids")
"""What TRL hands to a reward function beside the data set's columns."""


def reward_function(
    function: str | Callable[[Sample], Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str = "inline",
    processes: int = 2,
    timeout_s: float = 30.0,
    concurrency: int = 256,
    name: str = "",
) -> Callable[..., Any]:
    """A Penstock reward function in TRL's form: `f(prompts, completions, **columns) -> list[float | None]`.

    It is async where `function` is.

    Args:
        function: a callable, or an import path or file as in `reward.function`; the latter may have `options` and mode
            `process`.
        timeout_s: for one sample.
        concurrency: async calls at once; the whole batch is scored together.
        name: what TRL calls it in its metrics; the function's own name by default.

    The data set's other columns are the sample's row. Where TRL offers it, the share of unscored samples is logged as
    `NAME/unscored`, each part's mean as `NAME/PART`, and the causes are a column of its completions table.

    Raises:
        RewardError: the function can't be loaded or called with one sample.
    """
    rewards = Rewards(
        function, options=options, mode=mode, processes=processes, timeout_s=timeout_s, concurrency=concurrency
    )
    called = name or rewards.name

    async def scored(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        results = await rewards.score_all(_samples(prompts, completions, columns))
        _log(called, results, columns)
        return [result.value if isinstance(result, Score) else None for result in results]

    if rewards.is_async:
        scored.__name__ = scored.__qualname__ = called
        return scored
    loop = _Loop()

    def scored_sync(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return loop.run(scored(prompts, completions, **columns))

    scored_sync.__name__ = scored_sync.__qualname__ = called
    return scored_sync


class _Loop:
    """An event loop in a thread of its own, started when it is first needed: sync functions have none to run on."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def run(self, work: Any) -> Any:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="penstock-trl", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _samples(prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Sample]:
    count = len(completions)
    data = {
        name: column
        for name, column in columns.items()
        if name not in TRAINERS_OWN and isinstance(column, Sequence) and len(column) == count
    }
    step = getattr(columns.get("trainer_state"), "global_step", 0)
    token_ids = columns.get("completion_ids") or [()] * count
    numbers: dict[str, int] = {}
    replicas: Counter[int] = Counter()
    samples = []
    for n in range(count):
        text = text_of(prompts[n])
        number = numbers.setdefault(text, len(numbers))
        row = {"prompt": plain(prompts[n]), **{name: plain(column[n]) for name, column in data.items()}}
        identity = SampleId(f"trl-{step}", number, replicas[number])
        replicas[number] += 1
        samples.append(
            sample_of(text, text_of(completions[n]), row, f"batch[{n}]", identity, token_ids=plain(token_ids[n]))
        )
    return samples


def _log(name: str, results: Sequence[Score | Unscored], columns: Mapping[str, Any]) -> None:
    log_metric, log_extra = columns.get("log_metric"), columns.get("log_extra")
    unscored = [result for result in results if isinstance(result, Unscored)]
    if log_metric is not None and results:
        log_metric(f"{name}/unscored", len(unscored) / len(results))
        parts: dict[str, list[float]] = {}
        for result in results:
            for part, value in (result.parts if isinstance(result, Score) else {}).items():
                parts.setdefault(part, []).append(value)
        for part, values in parts.items():
            log_metric(f"{name}/{part}", sum(values) / len(values))
    if log_extra is not None:
        causes = [result.cause if isinstance(result, Unscored) else "" for result in results]
        log_extra(f"{name}/unscored_cause", causes)
