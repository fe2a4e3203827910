"""Verifiers of an answer's text: a pattern, tags in order, JSON of a given schema.

They decide by the response alone, or by the response and one field of the row. A pattern or a schema that can't be
compiled is refused before the run; one that comes with a row leaves that row's samples unscored.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from penstock.errors import MissingExtra, RewardError
from penstock.reward.options import factory
from penstock.sample import Sample, Score, Unscored

__all__ = ["format_match", "json_schema", "last_block", "regex_match"]

FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)


def last_block(text: str) -> str | None:
    """What stands in the last fenced block (three backticks), or None where there is none."""
    blocks = FENCED.findall(text)
    return blocks[-1] if blocks else None


@factory
def regex_match(
    pattern: str = "",
    *,
    pattern_field: str = "",
    match: Literal["search", "fullmatch"] = "search",
    group: int | str | None = None,
    field: str = "answer",
    take: Literal["first", "last"] = "last",
    ignore_case: bool = False,
    dot_all: bool = False,
) -> Callable[[Sample], Score | Unscored]:
    """1 where the response matches. With `group`, 1 where that group's text is the row's `field`, white space apart.

    The pattern is `pattern`, or the row's `pattern_field`. Of several matches the group is taken from the last one,
    unless `take` says the first. Python's `re` can take exponential time and holds the interpreter meanwhile: run
    patterns that you can't vouch for in mode `process`.

    Raises:
        RewardError: neither or both of the patterns, one that can't be compiled, or a group that it doesn't have.
    """
    if bool(pattern) == bool(pattern_field):
        raise RewardError("regex_match needs either 'pattern' or 'pattern_field'")
    flags = (re.IGNORECASE if ignore_case else 0) | (re.DOTALL if dot_all else 0)
    fixed = _compiled(pattern, flags, group) if pattern else None

    def verify(sample: Sample) -> Score | Unscored:
        compiled = fixed
        if compiled is None:
            given = sample.row.get(pattern_field)
            if not isinstance(given, str) or not given:
                return Unscored(f"the row of {sample.prompt.source} has no pattern in its field '{pattern_field}'")
            try:
                compiled = _compiled(given, flags, group)
            except RewardError as error:
                return Unscored(f"the row of {sample.prompt.source}: {error}")
        found = _find(compiled, sample.response, match, take if group is not None else "first")
        if group is None:
            return Score(float(found is not None))
        answer = sample.row.get(field)
        if not isinstance(answer, str | int | float):
            return Unscored(f"the row of {sample.prompt.source} has no text or number in its field '{field}'")
        text = found[group] if found is not None else None
        right = text is not None and text.strip() == str(answer).strip()
        return Score(float(right), {"matched": float(found is not None)})

    return verify


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str, flags: int, group: int | str | None) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise RewardError(f"the pattern {pattern!r} is no regular expression: {error}") from error
    groups = {*range(compiled.groups + 1), *compiled.groupindex}
    if group is not None and group not in groups:
        raise RewardError(f"the pattern {pattern!r} has no group {group!r}")
    return compiled


def _find(pattern: re.Pattern[str], text: str, match: str, take: str) -> re.Match[str] | None:
    if match == "fullmatch":
        return pattern.fullmatch(text)
    if take == "first":
        return pattern.search(text)
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


@factory
def format_match(
    tags: Sequence[str] = ("think", "answer"), *, strict: bool = True, partial: bool = False
) -> Callable[[Sample], Score]:
    """1 where the response is `<think>…</think><answer>…</answer>`: each of `tags` once, closed, and in order.

    Parts: each tag's name (1 where it is there exactly once and closed), `order`, and with `strict` also `outside` (1
    where nothing but white space stands outside the tags). `partial` makes the reward the parts' mean.

    Raises:
        RewardError: no tags, one twice, or one that is no name.
    """
    if not tags or len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w.-]+", tag) for tag in tags):
        raise RewardError(f"format_match: tags = {list(tags)}; give names, each once")
    if reserved := sorted({"order", "outside"} & set(tags)):
        raise RewardError(f"format_match: '{reserved[0]}' is the name of a part of its own and can't be a tag")

    def verify(sample: Sample) -> Score:
        text = sample.response
        places = {tag: _place(text, tag) for tag in tags}
        parts = {tag: float(place is not None) for tag, place in places.items()}
        found = [place for place in places.values() if place is not None]
        whole = len(found) == len(tags)
        parts["order"] = float(whole and all(a[1] <= b[0] for a, b in itertools.pairwise(found)))
        if strict:
            parts["outside"] = float(not _outside(text, found).strip())
        mean = sum(parts.values()) / len(parts)
        return Score(mean if partial else float(mean == 1.0), parts)

    return verify


def _outside(text: str, places: Sequence[tuple[int, int]]) -> str:
    """What no tag holds, where some may lie within others."""
    outside, reached = [], 0
    for start, end in sorted(places):
        outside.append(text[reached:start])
        reached = max(reached, end)
    return "".join([*outside, text[reached:]])


def _place(text: str, tag: str) -> tuple[int, int] | None:
    """From where to where a tag reaches, if it is opened once and closed once, in that order."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.index(opening), text.index(closing)
    return (start, end + len(closing)) if start < end else None


@factory
def json_schema(
    schema: dict[str, Any] | None = None, *, schema_file: str = "", field: str = "", fenced: bool = True
) -> Callable[[Sample], Score | Unscored]:
    """1 where the response is JSON that fits a JSON schema, else 0. Parts: `json` (it is JSON at all), `errors`.

    The schema is `schema`, the file `schema_file`, or the row's `field` (an object or its JSON text); its `$schema`
    says which draft, 2020-12 by default. Only what a schema holds itself is looked up: nothing is fetched. With
    `fenced`, the last fenced block is read where there is one. `NaN`, `Infinity` and a key twice are no JSON. Patterns
    in a schema may take exponential time; see `regex_match`.

    Raises:
        MissingExtra: jsonschema is not installed.
        RewardError: no schema or several, or one that is none.
    """
    if sum(map(bool, (schema is not None, schema_file, field))) != 1:
        raise RewardError("json_schema needs one of 'schema', 'schema_file' and 'field'")
    if schema_file:
        try:
            schema = json.loads(Path(schema_file).read_text())
        except (OSError, ValueError) as error:
            raise RewardError(f"json_schema: the schema file {schema_file} can't be read: {error}") from error
    _jsonschema()
    fixed = _validator(schema) if schema is not None else None

    def verify(sample: Sample) -> Score | Unscored:
        validator = fixed
        if validator is None:
            try:
                given = sample.row.get(field)
                validator = _validator_of(given if isinstance(given, str) else json.dumps(given, sort_keys=True))
            except (RewardError, TypeError, ValueError) as error:
                return Unscored(f"the row of {sample.prompt.source}, field '{field}': {error}")
        block = last_block(sample.response) if fenced else None
        try:
            value = json.loads(
                sample.response if block is None else block, parse_constant=_no_json, object_pairs_hook=_no_key_twice
            )
        except (ValueError, RecursionError):
            return Score(0.0, {"json": 0.0})
        errors = float(sum(1 for _ in validator.iter_errors(value)))
        return Score(float(errors == 0), {"json": 1.0, "errors": errors})

    return verify


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError as error:
        raise MissingExtra("jsonschema", "json", "checking JSON against a schema") from error
    return jsonschema


def _validator(schema: object) -> Any:
    """Raises RewardError for what is no schema, and for references that lead outside it only when they are met."""
    import referencing

    jsonschema = _jsonschema()
    if not isinstance(schema, Mapping | bool):
        raise RewardError(f"a JSON schema is an object or a truth value, not {type(schema).__name__}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.exceptions.SchemaError as error:
        raise RewardError(f"it is not a JSON schema: {error.message}") from error
    return kind(schema, registry=referencing.Registry())


@functools.lru_cache(maxsize=256)
def _validator_of(text: str) -> Any:
    return _validator(json.loads(text))
