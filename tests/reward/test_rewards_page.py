"""The examples of docs/rewards.md, run as they stand there."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.run import RewardConfig
from penstock.reward import Sample, Score, Scorer, Unscored, load_function

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.fixture
def in_a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.py)\n", code)
        assert name, "each example begins with its file's name"
        (tmp_path / name[1]).write_text(code)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("mode", ["inline", "process"])
@pytest.mark.usefixtures("in_a_users_folder")
async def test_the_examples_score(make_sample: Callable[..., Sample], mode: str) -> None:
    configured = re.findall(r"```toml\n(.*?)```", PAGE, re.S)[0]
    config = RewardConfig(**tomllib.loads(configured)["reward"], mode=mode)
    for path, row, expected in [
        (config.function, {"answer": "42"}, Score(1.0, {"tokens": 3.0})),
        ("./judge.py:reward", {"answer": "4"}, Score(1.0)),
        ("./judge.py:reward", {"question": "?"}, Unscored("the row has no answer to compare with")),
    ]:
        scorer = Scorer(path, mode=config.mode, processes=1)
        assert await scorer.score(make_sample("42", **row)) == expected
        await scorer.close()


@pytest.mark.usefixtures("in_a_users_folder")
def test_every_configuration_of_the_page_names_a_function_that_takes_its_options() -> None:
    for configured in re.findall(r"```toml\n(.*?)```", PAGE, re.S):
        config = RewardConfig(**tomllib.loads(configured)["reward"])
        load_function(config.function, config.options)


@pytest.mark.usefixtures("in_a_users_folder")
def test_local_endpoints_are_declared_as_the_page_says() -> None:
    pool, reward = runpy.run_path("local_endpoints.py")["pool_and_reward"]()
    assert [endpoint.label for endpoint in pool.endpoints][1:] == ["local:sandbox", "local:prover"]
    assert [endpoint.concurrency for endpoint in pool.endpoints] == [32, 2, 4]
    assert callable(reward)


NEEDED = {
    "regex_match": {"pattern": "x"},
    "json_schema": {"schema": {"type": "object"}},
    "within_tags": {"verifier": "penstock.reward.verifiers:exact_match"},
    "weighted": {"parts": [{"function": "penstock.reward.verifiers:exact_match"}]},
}
"""Options without which a verifier can't be."""


def test_the_verifiers_of_the_page_are_all_there_are() -> None:
    from penstock.reward import verifiers

    named = re.findall(r"\| `(penstock\.reward\.verifiers:\w+)` \|", PAGE)
    assert sorted(path.rpartition(":")[2] for path in named) == sorted(verifiers.__all__)
    for path in named:
        name = path.rpartition(":")[2]
        if name != "sandbox_fusion":  # which needs a pool's file
            load_function(path, NEEDED.get(name))
