from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import MissingExtra, RewardError
from penstock.reward import Sample, Score, Scorer, Unscored
from penstock.reward.verifiers import format_match, json_schema, regex_match
from penstock.reward.verifiers.text import last_block

REGEX = "penstock.reward.verifiers:regex_match"


@pytest.mark.parametrize(
    ("options", "response", "value"),
    [
        ({"pattern": r"\d+"}, "about 42 or so", 1.0),
        ({"pattern": r"\d+"}, "none", 0.0),
        ({"pattern": r"\d+", "match": "fullmatch"}, "about 42", 0.0),
        ({"pattern": r"\d+", "match": "fullmatch"}, "42", 1.0),
        ({"pattern": r"= (\d+)", "group": 1}, "= 1 then = 42", 1.0),
        ({"pattern": r"= (\d+)", "group": 1, "take": "first"}, "= 1 then = 42", 0.0),
        ({"pattern": r"(?P<a>\d+)", "group": "a"}, "42", 1.0),
        ({"pattern": r"(\d+)", "group": 1, "field": "other"}, "7", 1.0),
        ({"pattern": "YES", "ignore_case": True}, "yes", 1.0),
        ({"pattern": "YES"}, "yes", 0.0),
        ({"pattern": "a.b", "dot_all": True}, "a\nb", 1.0),
        ({"pattern": "a.b"}, "a\nb", 0.0),
        ({"pattern_field": "wanted"}, "xyz", 1.0),
        ({"pattern_field": "wanted"}, "abc", 0.0),
    ],
)
def test_a_pattern_scores_by_its_options(
    make_sample: Callable[..., Sample], options: dict[str, Any], response: str, value: float
) -> None:
    sample = make_sample(response, answer="42", other=7, wanted="y")
    result = regex_match(**options)(sample)
    assert isinstance(result, Score)
    assert result.value == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either 'pattern' or 'pattern_field'"),
        ({"pattern": "a", "pattern_field": "b"}, "either"),
        ({"pattern": "("}, r"no regular expression"),
        ({"pattern": "a", "group": 2}, r"no group 2"),
    ],
)
def test_a_pattern_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        regex_match(**options)


@pytest.mark.parametrize("row", [{"wanted": "("}, {"wanted": None}, {"answer": "a"}])
def test_a_rows_pattern_that_cannot_be_leaves_the_sample_unscored(
    make_sample: Callable[..., Sample], row: dict[str, Any]
) -> None:
    assert isinstance(regex_match(pattern_field="wanted")(make_sample("x", **row)), Unscored)


async def test_a_pattern_that_never_ends_is_killed_in_its_process(make_sample: Callable[..., Sample]) -> None:
    scorer = Scorer(REGEX, options={"pattern": "(a+)+$"}, mode="process", processes=1, timeout_s=4)
    result = await scorer.score(make_sample("a" * 64 + "b"))
    assert isinstance(result, Unscored)
    assert "killed" in result.cause
    assert await scorer.score(make_sample("aaa")) == Score(1.0)
    await scorer.close()


WELL = "<think>so</think> <answer>42</answer>"


@pytest.mark.parametrize(
    ("response", "failing"),
    [
        (WELL, set()),
        ("<answer>42</answer><think>so</think>", {"order"}),
        ("<think>so</think>", {"answer", "order"}),
        (WELL + "<answer>43</answer>", {"answer", "order", "outside"}),
        (WELL + " and more", {"outside"}),
        ("</think>so<think><answer>42</answer>", {"think", "order", "outside"}),
        ("<think><answer>42</answer></think>", {"order"}),
        ("", {"think", "answer", "order"}),
    ],
)
def test_a_format_is_judged_part_by_part(make_sample: Callable[..., Sample], response: str, failing: set[str]) -> None:
    score = format_match()(make_sample(response))
    assert {name for name, value in score.parts.items() if value == 0.0} == failing
    assert set(score.parts) == {"think", "answer", "order", "outside"}
    assert score.value == float(not failing)


def test_a_formats_options_change_what_counts(make_sample: Callable[..., Sample]) -> None:
    loose = make_sample(WELL + " and more")
    assert format_match(strict=False)(loose).value == 1.0
    assert format_match(partial=True)(loose).value == 3 / 4
    assert format_match(tags=["answer"], strict=False)(make_sample("so <answer>1</answer>")).value == 1.0
    for tags in ([], ["a", "a"], ["a b"], ["order"]):
        with pytest.raises(RewardError, match="format_match"):
            format_match(tags=tags)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"n": 1}', Score(1.0, {"json": 1.0, "errors": 0.0})),
        ('so:\n```json\n{"n": 1}\n```\n', Score(1.0, {"json": 1.0, "errors": 0.0})),
        ('{"n": "1"}', Score(0.0, {"json": 1.0, "errors": 1.0})),
        ("{}", Score(0.0, {"json": 1.0, "errors": 1.0})),
        ("{n: 1}", Score(0.0, {"json": 0.0})),
        ('{"n": NaN}', Score(0.0, {"json": 0.0})),
        ('{"n": 1, "n": 2}', Score(0.0, {"json": 0.0})),
        ("[" * 100_000, Score(0.0, {"json": 0.0})),
        ("", Score(0.0, {"json": 0.0})),
    ],
)
def test_json_is_held_against_its_schema(make_sample: Callable[..., Sample], response: str, expected: Score) -> None:
    assert json_schema(SCHEMA)(make_sample(response)) == expected


def test_a_schema_comes_from_options_a_file_or_the_row(make_sample: Callable[..., Sample], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert json_schema(schema_file=str(file))(make_sample('{"n": 1}')).value == 1.0
    for given in (SCHEMA, json.dumps(SCHEMA)):
        assert json_schema(field="schema")(make_sample('{"n": 1}', schema=given)).value == 1.0
        assert json_schema(field="schema")(make_sample("{}", schema=given)).value == 0.0
    fenced = make_sample('```\n{"n": 1}\n```')
    assert json_schema(SCHEMA, fenced=False)(fenced) == Score(0.0, {"json": 0.0})


def test_a_schema_that_is_none_is_refused_and_one_of_a_row_leaves_it_unscored(
    make_sample: Callable[..., Sample], tmp_path: Path
) -> None:
    for options in (
        {},
        {"schema": SCHEMA, "field": "s"},
        {"schema": {"type": 7}},
        {"schema_file": str(tmp_path / "x")},
    ):
        with pytest.raises(RewardError):
            json_schema(**options)
    for given in ({"type": 7}, "{", None, 5):
        assert isinstance(json_schema(field="s")(make_sample("{}", s=given)), Unscored)


async def test_a_schema_that_points_elsewhere_is_not_fetched(make_sample: Callable[..., Sample]) -> None:
    scorer = Scorer("penstock.reward.verifiers:json_schema", options={"schema": {"$ref": "http://127.0.0.1:9/x"}})
    result = await scorer.score(make_sample("{}"))
    assert isinstance(result, Unscored)
    assert "Unresolvable" in result.cause
    await scorer.close()


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingExtra, match=r"penstock\[json\]"):
        json_schema(SCHEMA)


def test_the_last_fenced_block_is_the_answers() -> None:
    assert last_block("no block") is None
    assert last_block("```python\na\n```\nthen\n```\nb\nc\n```\n") == "b\nc\n"
    assert last_block("``` not closed\na") is None
