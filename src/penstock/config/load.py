"""From TOML files and `--a.b=c` overrides to one RunConfig, or to one message that lists all that is wrong.

Decides how layers combine: a later file wins over an earlier one, an override over all files; tables are merged, lists
are replaced. `extends = "base.toml"` at the top of a file puts another file below it. For every value it remembers who
set it, so that a refusal can name the file or the override. What the keys mean is the models' business (`run`).
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.config.describe import Path as KeyPath
from penstock.config.describe import Place, allowed, dotted, place_at
from penstock.config.renamed import carry_over
from penstock.config.run import RunConfig
from penstock.config.toml import parse_value, read_toml, write_toml
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)
_OVERRIDE = re.compile(r"--([A-Za-z_][A-Za-z0-9_.-]*)(?:=(.*))?\Z", re.DOTALL)
_KEY_IN_TEXT = re.compile(r"[a-z_]+(?:\.[a-z_0-9]+)+")
_SHOWN_CHARACTERS = 80
_SHOWN_KEYS = 8
"""Of a section, in one refusal."""


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that files (later ones win) and overrides (they win over files) add up to.

    `overrides` are command-line words: `--a.b=c`, `--a.b c`, or `--a.b` alone for true. Raises ConfigError that lists
    every problem found: the key, its value, what is allowed, and the file or override that set it.
    """
    layers = _Layers()
    for file in files:
        layers.add_file(file)
    for key, text, word in _pairs(overrides):
        layers.add_override(key, text, word)
    return layers.validate()


def dump_toml(config: RunConfig) -> str:
    """The whole resolved configuration as TOML that loads back to the same one."""
    return write_toml(config.model_dump(mode="json"))


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Command-line words as (all others, overrides). An override's key has a dot or is one of the top level.

    `--train.lr 1e-5` takes the next word as its value; a switch (true or false) takes it only if it is one of the two.
    """
    others: list[str] = []
    overrides: list[str] = []
    k = 0
    while k < len(words):
        word = words[k]
        k += 1
        if word == "--":
            others += words[k - 1 :]
            break
        key = _override_key(word)
        if key is None:
            others.append(word)
            continue
        overrides.append(word)
        if "=" not in word and k < len(words) and _takes_value(key, words[k]):
            overrides.append(words[k])
            k += 1
    return others, overrides


def _override_key(word: str) -> str | None:
    match = _OVERRIDE.match(word)
    if match is None:
        return None
    key = match.group(1)
    return key if "." in key or key in RunConfig.model_fields else None


def _takes_value(key: str, following: str) -> bool:
    if following.startswith("--"):
        return False
    place = place_at(RunConfig, _path(key))
    return following.lower() in ("true", "false") if place is not None and place.is_flag else True


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """(key, value or None for a bare switch, the words as they were written), one for each override."""
    k = 0
    while k < len(words):
        match = _OVERRIDE.match(words[k])
        if match is None:
            raise ConfigError(f"{words[k]!r} is not an override; write --section.key=value")
        key, value, written = match.group(1), match.group(2), words[k]
        k += 1
        if value is None and k < len(words) and _takes_value(key, words[k]):
            value, written = words[k], f"{written} {words[k]}"
            k += 1
        yield key, value, written


class _Layers:
    """Values as they pile up, who set each, and what was wrong on the way."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[KeyPath, str] = {}
        self._problems: list[str] = []
        self._refused: set[KeyPath] = set()

    def add_file(self, file: Path, above: tuple[Path, ...] = ()) -> None:
        """A file over everything before it, and what it extends below it. `above`: the files that led here."""
        resolved = file.resolve()
        if resolved in above:
            raise ConfigError(f"{file}: extends itself, by way of {', '.join(str(path) for path in above)}")
        table = read_toml(file)
        base = table.pop("extends", None)
        if base is not None:
            if not isinstance(base, str):
                raise ConfigError(f"{file}: extends = {_shown(base)}: must be the path of one TOML file")
            self.add_file(file.parent / base, (*above, resolved))
        self._merge(self._values, table, (), str(file))

    def add_override(self, key: str, text: str | None, written: str) -> None:
        """One dotted override; numbers in the key index into lists, and one past the end appends."""
        path, written = _path(key), _cut(written)
        place = place_at(RunConfig, path)
        if text is None and place is not None and not place.is_flag:
            self._problems.append(f"{written}: needs a value: {key} must be {allowed(place)}")
            return
        value = True if text is None else _override_value(text, place)
        problem = self._put(path, value, written)
        if problem:
            self._problems.append(f"{written}: {problem}")

    def validate(self) -> RunConfig:
        """The models' verdict. Strict: text is no number and true is no 1."""
        hints, problems = carry_over(self._values, self._moved)
        self._problems += problems
        for hint in hints:
            _log.warning("%s", hint)
        _none_where_optional(self._values, ())
        self._refuse_unbounded(self._values, ())
        if not self._values and not self._problems:
            raise ConfigError("the configuration is empty; name a TOML file, e.g. configs/quickstart.toml")
        config = None
        try:
            config = RunConfig.model_validate_json(json.dumps(self._values, default=str), strict=True)
        except ValidationError as error:
            fresh = [problem for problem in error.errors() if _known_path(problem["loc"]) not in self._refused]
            self._problems += _without_repeats(self._sentence(problem) for problem in fresh)
        if config is None or self._problems:
            count = len(self._problems)
            head = "the configuration has a problem:" if count == 1 else f"the configuration has {count} problems:"
            raise ConfigError("\n".join([head, *(f"  - {problem}" for problem in self._problems)]))
        return config

    def _moved(self, old: KeyPath, new: KeyPath) -> None:
        if old in self._origins:
            self._origins[new] = self._origins.pop(old)

    def _merge(self, into: dict[str, Any], table: dict[str, Any], path: KeyPath, origin: str) -> None:
        for key, value in table.items():
            here: KeyPath = (*path, key)
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(into[key], value, here, origin)
            else:
                into[key] = value
                self._set_origin(here, origin)

    def _put(self, path: KeyPath, value: Any, origin: str) -> str:
        """Sets one value, making the sections on the way. Returns what stands in the way, or nothing."""
        container: Any = self._values
        for depth, part in enumerate(path):
            last = depth == len(path) - 1
            if isinstance(container, list):
                if not isinstance(part, int) or part > len(container):
                    where = dotted(path[:depth])
                    return f"{where} is a list of {len(container)}; it has no entry {part!r} (numbers start at 0)"
                if part == len(container):
                    container.append({})
            elif not isinstance(container, dict):
                return f"{dotted(path[:depth])} is the value {_shown(container)} and has no keys"
            else:
                part = str(part)
                place = place_at(RunConfig, path[: depth + 1])
                starts_list = place is not None and place.entry is not None
                container.setdefault(part, [] if starts_list else {})
            if last:
                container[part] = value
                self._set_origin(path, origin)
            else:
                container = container[part]
        return ""

    def _set_origin(self, path: KeyPath, origin: str) -> None:
        for old in [old for old in self._origins if old[: len(path)] == path]:
            del self._origins[old]
        self._origins[path] = origin

    def _origin(self, path: KeyPath) -> str:
        """Who set the value at a path: those who set it or parts of it, else the nearest above."""
        setters = {origin for key, origin in self._origins.items() if path and key[: len(path)] == path}
        for length in range(len(path) - 1, 0, -1):
            if not setters and path[:length] in self._origins:
                setters = {self._origins[path[:length]]}
        return f" (from {', '.join(sorted(setters))})" if setters else ""

    def _refuse_unbounded(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                self._refuse_unbounded(entry, (*path, key))
        elif isinstance(value, list):
            for number, entry in enumerate(value):
                self._refuse_unbounded(entry, (*path, number))
        elif isinstance(value, float) and not math.isfinite(value):
            self._refused.add(path)
            self._problems.append(f"{dotted(path)} = {value}{self._origin(path)}: must be a finite number")

    def _sentence(self, problem: Any) -> str:
        """One of pydantic's error records, for a person."""
        path = _known_path(problem["loc"])
        kind, value = problem["type"], problem["input"]
        head = f"{dotted(path)} = {_shown(value)}{self._origin(path)}"
        if kind == "extra_forbidden":
            return f"{head}: there is no such key{_near(path)}"
        place = place_at(RunConfig, path)
        if kind == "missing":
            must = f"; must be {allowed(place)}" if place is not None else ""
            return f"{dotted(path)} is missing{self._origin(path[:-1])}{must}"
        if kind == "value_error" or place is None:
            return self._with_origins(str(problem["msg"]).removeprefix("Value error, "))
        return f"{head}: must be {allowed(place)}"

    def _with_origins(self, message: str) -> str:
        """A model's own sentence, and who set the keys that it names."""
        named = dict.fromkeys(_KEY_IN_TEXT.findall(message))
        known = [(key, self._origin(_path(key))) for key in named if place_at(RunConfig, _path(key)) is not None]
        told = [f"{key}{origin}" for key, origin in known if origin]
        return f"{message}; {', '.join(told)}" if told else message


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _override_value(text: str, place: Place | None) -> Any:
    """TOML where it parses; text as it stands where only text is allowed (so that `007` stays `007`)."""
    value = parse_value(text)
    if place is not None and place.is_text and not isinstance(value, str):
        return text
    if place is not None and place.is_flag and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return value


def _none_where_optional(value: Any, path: KeyPath) -> None:
    """`"none"` unsets a value that may be absent: TOML has no null, and a layer must be able to say so."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        here: KeyPath = (*path, key)
        place = place_at(RunConfig, here)
        if entry == "none" and place is not None and place.optional and not place.is_text:
            value[key] = None
        else:
            _none_where_optional(entry, here)


def _known_path(location: Sequence[str | int]) -> KeyPath:
    """pydantic's location without the tags that it adds for members of a union."""
    path: KeyPath = ()
    for part in location:
        if path and place_at(RunConfig, path) is not None and place_at(RunConfig, (*path, part)) is None:
            section = place_at(RunConfig, path)
            if section is not None and section.section is None:
                return path
        path = (*path, part)
    return path


def _near(path: KeyPath) -> str:
    """What the section does allow: the closest names, and the others where a person can take them in at a glance."""
    parent = place_at(RunConfig, path[:-1])
    if parent is None or parent.section is None:
        return ""
    names = list(parent.section.model_fields)
    close = difflib.get_close_matches(str(path[-1]).replace("-", "_"), names, n=2)
    guess = f"; did you mean {' or '.join(dotted((*path[:-1], name)) for name in close)}?" if close else "."
    where = dotted(path[:-1]) or "the top level"
    if len(names) <= _SHOWN_KEYS:
        return f"{guess} {where} has: {', '.join(names)}"
    if close:
        return f"{guess} --help-config lists all {len(names)} keys of {where}"
    shown = ", ".join(names[:_SHOWN_KEYS])
    return f"{guess} {where} has: {shown} and {len(names) - _SHOWN_KEYS} more, which --help-config lists"


def _shown(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False, default=str))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _without_repeats(sentences: Iterator[str]) -> list[str]:
    """A union reports each of its members; the sentence is the same."""
    return list(dict.fromkeys(sentences))
