"""The slime adapter by its contract: slime is no package, so its sample is written down here as slime has it."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.integrations.slime import custom_group_rm, custom_rm
from penstock.reward import load_function

FUNCTIONS = Path(__file__).parent / "rewards_for_frameworks.py"


class Status(enum.Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclasses.dataclass
class SlimeSample:
    """The fields of slime 0.3.1's `slime.utils.types.Sample` that a reward function meets."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    status: Status = Status.COMPLETED
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False


def group(broken: bool = False) -> list[SlimeSample]:
    return [
        SlimeSample(5, n, "1 + 1?", [7, 8, 9, 1], f"it is {n}", 2, "2", metadata={"broken": broken and n == 1})
        for n in range(3)
    ]


def args(name: str = "right", **more: Any) -> SimpleNamespace:
    given = {"function": f"{FUNCTIONS}:{name}", "unscored_value": -1.0, **more}
    return SimpleNamespace(**{f"penstock_reward_{key}": value for key, value in given.items()})


def test_the_parameters_are_called_as_slime_wants_them() -> None:
    assert list(inspect.signature(custom_rm).parameters)[:2] == ["args", "sample"]
    assert list(inspect.signature(custom_group_rm).parameters)[:2] == ["args", "samples"]
    assert inspect.iscoroutinefunction(custom_rm)
    assert inspect.iscoroutinefunction(custom_group_rm)


@pytest.mark.parametrize("name", ["right", "right_later", "judge"])
async def test_a_group_and_its_members_get_the_same_rewards(name: str) -> None:
    assert await custom_group_rm(args(name), group()) == [0.0, 0.0, 1.0]
    assert [await custom_rm(args(name), sample) for sample in group()] == [0.0, 0.0, 1.0]


async def test_a_sample_without_a_score_is_kept_out_of_the_loss_with_its_cause() -> None:
    samples = group(broken=True)
    assert await custom_group_rm(args(), samples) == [0.0, -1.0, 1.0]
    assert [sample.remove_sample for sample in samples] == [False, True, False]
    assert "no judge for this one" in samples[1].metadata["unscored"]
    assert samples[1].metadata["broken"] is True


async def test_the_function_sees_prompt_tokens_log_probabilities_and_a_cut_off_end() -> None:
    load_function(f"{FUNCTIONS}:right").call.__globals__["seen"].clear()
    chat = [{"role": "user", "content": "1 + 1?"}]
    sample = SlimeSample(5, 1, chat, [7, 8, 9, 1], "2", 2, "2", status=Status.TRUNCATED, rollout_log_probs=[-1.0, -2.0])
    assert await custom_rm(args(), sample) == 1.0
    [seen] = load_function(f"{FUNCTIONS}:right").call.__globals__["seen"]
    assert seen.prompt.text == "1 + 1?"
    assert (list(seen.prompt.token_ids), list(seen.token_ids), list(seen.logprobs)) == ([7, 8], [9, 1], [-1.0, -2.0])
    assert seen.truncated
    assert seen.row == {"prompt": chat, "label": "2", "answer": "2"}


async def test_a_blocking_function_does_not_hold_slimes_loop() -> None:
    """The functions wait for what the loop does meanwhile: on the loop itself they would wait for ever."""
    module = load_function(f"{Path(__file__)}:blocks").call.__globals__
    scored = asyncio.ensure_future(custom_group_rm(args_of_this_file("blocks"), group()))
    await asyncio.to_thread(module["entered"].wait, 60)
    module["released"].set()
    assert await scored == [1.0, 1.0, 1.0]


async def test_a_function_may_run_in_processes() -> None:
    settings = {"mode": "process", "processes": 1, "timeout_s": 60.0}
    assert await custom_rm(args("where"), group()[0]) == 0.0
    assert await custom_rm(args("where", **settings), group()[0]) == 1.0


async def test_settings_come_from_the_environment_and_nothing_is_scored_silently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="no reward function"):
        await custom_rm(SimpleNamespace(), group()[0])
    monkeypatch.setenv("PENSTOCK_REWARD_FUNCTION", f"{FUNCTIONS}:right")
    with pytest.raises(ConfigError, match="unscored_value"):
        await custom_rm(SimpleNamespace(), group()[0])
    monkeypatch.setenv("PENSTOCK_REWARD_UNSCORED_VALUE", "0.25")
    assert await custom_group_rm(SimpleNamespace(), group(broken=True)) == [0.0, 0.25, 1.0]


def args_of_this_file(name: str) -> SimpleNamespace:
    return SimpleNamespace(penstock_reward_function=f"{Path(__file__)}:{name}", penstock_reward_unscored_value=0.0)


def _events() -> tuple[Any, Any]:
    import threading

    return threading.Event(), threading.Event()


entered, released = _events()


def blocks(sample: Any) -> float:
    entered.set()
    return float(released.wait(60))
