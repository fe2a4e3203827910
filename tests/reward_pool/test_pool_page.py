"""The examples of docs/pool.md, run as they stand there, with their services replaced by local ones."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import pytest

from penstock.reward import (
    FunctionTransport,
    Sample,
    Score,
    Unscored,
    failures,
    load_function,
    load_pool,
    reload_functions,
)
from penstock.reward.pool import ComputePool
from penstock.sample import Finish, Prompt, SampleId

PAGE = (Path(__file__).parents[2] / "docs" / "pool.md").read_text()


def sample(response: str) -> Sample:
    prompt = Prompt(0, "2 + 2 = ?", [1], {"answer": "4"}, "here:1")
    return Sample(SampleId("b", 0, 0), prompt, array("i", [1]), array("f", [0.0]), (), Finish.STOP, response)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for code in re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.\w+)\n", code)
        assert name, "each example begins with its file's name"
        (tmp_path / name[1]).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_the_judge_scores(files: Path) -> None:
    reward = load_function("./judge.py:reward").call
    pool: ComputePool = reward.__globals__["pool"]

    def judge(body: dict[str, Any]) -> dict[str, Any]:
        asked = body["messages"][0]["content"]
        word = "Yes" if "Answer: 4" in asked else "no" if "Answer: 5" in asked else "maybe"
        return {"choices": [{"message": {"content": word}}]}

    pool._http = FunctionTransport(judge)
    assert await reward(sample("4")) == Score(1.0)
    assert await reward(sample("5")) == Score(0.0)
    assert await reward(sample("6")) == Unscored("the judge said 'maybe'")
    await pool.close()


async def test_the_other_examples_score(files: Path) -> None:
    assert await load_function("./careful.py:reward").call(sample("4")) == 1.0
    assert await load_function("./parts.py:reward").call(sample("4")) == Score(1.1, {"right": 1.0, "short": 1.0})


def test_the_pool_file_is_one(files: Path) -> None:
    config = load_pool(files / "pool.toml")
    assert len(config.endpoints) == 2
    assert config.pool.max_spend == 25.0


def test_the_failures_of_the_page_are_all_there_are() -> None:
    for name in failures.__all__:
        assert f"`{name}`" in PAGE


def test_the_file_of_limits_is_one(files: Path) -> None:
    careful = load_function("./careful.py:reward")
    assert reload_functions("limits.toml") == ["reward"]
    assert careful.call.turns.concurrency == 16  # type: ignore[attr-defined]
