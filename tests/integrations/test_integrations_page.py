"""The examples of docs/integrations.md, run as they stand there."""

from __future__ import annotations

import asyncio
import re
import tomllib
from array import array
from pathlib import Path

import pytest

from penstock.config.run import RewardConfig
from penstock.reward import Unscored, load_function
from penstock.sample import Finish, Prompt, Sample, SampleId
from penstock.simulate.provider_server import ProviderServer

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for code in re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, re.S):
        name = re.match(r"# (\w+\.\w+)\n", code)
        assert name, "each example begins with its file's name"
        (tmp_path / name[1]).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_the_judge_of_the_page_asks_three_times_with_its_rubric(files: Path) -> None:
    async with ProviderServer() as server:
        (files / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n')
        config = RewardConfig(**tomllib.loads((files / "run.toml").read_text())["reward"])
        reward = load_function(config.function, config.options)
        prompt = Prompt(0, "1 + 1 = ?", (), {"answer": "2"}, "here:1")
        sample = Sample(SampleId("b", 0, 0), prompt, array("i"), array("f"), (), Finish.STOP, "2")
        assert isinstance(await reward.call(sample), Unscored)  # this provider echoes
        first = [body for path, body in server.seen if len(body["messages"]) == 2]
        assert sorted(body["seed"] for body in first) == [0, 1, 2]
        assert "- correct (0 to 1): 0: wrong. 1: right." in first[0]["messages"][1]["content"]


def test_the_functions_of_the_page_are_there(files: Path) -> None:
    pool = files / "pool.toml"
    pool.write_text('[[endpoints]]\nurl = "http://127.0.0.1:1"\n')
    for path in re.findall(r"`(penstock\.reward\.reward_models:\w+)`", PAGE):
        load_function(path, {"pool": str(pool), "model": "rm"})


def test_trls_function_of_the_page_scores(files: Path) -> None:
    reward = load_function("./grpo.py:right").call.__globals__["reward_funcs"][0]
    scored = reward(prompts=["a", "a"], completions=["it is 2", "no"], answer=["2", "2"])
    assert asyncio.run(scored) == [1.0, 0.0]
