"""Options of reward functions: which are taken, which are refused, and that they cross to processes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli import main
from penstock.config.run import RewardConfig
from penstock.errors import RewardError
from penstock.reward import Sample, Score, Scorer, Unscored, factory, load_function

FUNCTIONS = """
from penstock.errors import RewardError
from penstock.reward import factory

def plain(sample, *, tolerance: float = 0.0, word: str = "42"):
    return float(sample.response == word) + tolerance

async def waiting(sample, bonus: int = 0):
    return float(bonus)

@factory
def made(word: str, *, times: int = 1):
    if times < 0:
        raise RewardError("times is below 0")
    def verify(sample):
        return float(sample.response == word) * times
    return verify
"""


@pytest.fixture
def path(tmp_path: Path) -> Callable[[str], str]:
    file = tmp_path / "with_options.py"
    file.write_text(FUNCTIONS)
    return lambda name: f"{file}:{name}"


@pytest.mark.parametrize("mode", ["inline", "process"])
@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("plain", {}, 1.0),
        ("plain", {"tolerance": 0.5}, 1.5),
        ("plain", {"word": "43"}, 0.0),
        ("waiting", {"bonus": 3}, 3.0),
        ("made", {"word": "42"}, 1.0),
        ("made", {"word": "42", "times": 4}, 4.0),
    ],
)
async def test_options_reach_the_function_in_either_mode(
    make_sample: Callable[..., Sample],
    path: Callable[[str], str],
    mode: str,
    name: str,
    options: dict[str, Any],
    value: float,
) -> None:
    scorer = Scorer(path(name), options=options, mode=mode, processes=1, timeout_s=60)
    assert await scorer.score(make_sample("42")) == Score(value)
    await scorer.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", {"tolerence": 1.0}, r"has no option 'tolerence'; did you mean 'tolerance'\?"),
        ("plain", {"x": 1}, r"has no option 'x'; its options are: tolerance, word"),
        ("plain", {"sample": 1}, r"has no option 'sample'"),
        ("plain", {"tolerance": "much"}, r"option 'tolerance' is 'much': .*number"),
        ("made", {"times": 1}, r"needs the option 'word'"),
        ("made", {"word": "42", "times": -1}, r"made': times is below 0"),
        ("made", {"word": "42", "time": 1}, r"has no option 'time'; did you mean 'times'\?"),
    ],
)
async def test_an_option_that_cannot_be_is_refused_by_name_before_the_first_sample(
    path: Callable[[str], str], name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        load_function(path(name), options)
    scorer = Scorer(path(name), options=options, mode="process", processes=1)
    with pytest.raises(RewardError, match=message):
        await scorer.start()


def test_options_that_no_process_could_read_are_refused(path: Callable[[str], str]) -> None:
    with pytest.raises(RewardError, match=r"reward.options can't be sent"):
        Scorer(path("plain"), options={"word": object()}, mode="process")


def test_options_of_evaluation_need_a_function_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"reward\.eval_options needs reward\.eval_function"):
        RewardConfig(eval_options={"a": 1})
    written = tomllib.loads('options = { pattern = "x" }\neval_function = "m:f"\neval_options = { group = 1 }')
    config = RewardConfig(**written)
    assert (config.options, config.eval_options) == ({"pattern": "x"}, {"group": 1})


def test_the_score_command_takes_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "answers.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"response": "it is 7", "answer": 7}\n')
    words = ["reward", "score", str(file), "--function", "penstock.reward.verifiers:regex_match", "--out", str(out)]
    assert main([*words, "--options", '{"pattern": "is (\\\\d)", "group": 1}']) == 0
    assert msgspec.json.decode(out.read_bytes())["score"] == 1.0
    out.unlink()
    assert main([*words, "--options", "[1]"]) != 0
    assert "must be a JSON object" in capsys.readouterr().err


def test_what_a_factory_makes_is_called_by_its_name() -> None:
    @factory
    def named(value: float = 1.0) -> Callable[[Sample], Score | Unscored]:
        return lambda sample: Score(value)

    assert named(2.0).__name__ == "named"
