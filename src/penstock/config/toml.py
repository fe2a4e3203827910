"""TOML in and out: reads with file and line in every refusal, writes what loads back to the same values.

The standard library reads TOML and does not write it. What is written here is the part that a configuration needs:
tables, arrays of tables, text, numbers, booleans, lists. Knows nothing about what the keys mean.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+\Z")
_WHERE = re.compile(r"\s*\(at (?:line (\d+), column (\d+)|end of document)\)\Z")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts. Raises ConfigError with `file:line:column` for what can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; a configuration is a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        match = _WHERE.search(message)
        line, column = (match.group(1), match.group(2)) if match and match.group(1) else (text.count("\n") + 1, 1)
        raise ConfigError(f"{path}:{line}:{column}: not TOML: {_WHERE.sub('', message)}") from None


def parse_value(text: str) -> Any:
    """One TOML value; text that isn't TOML stays text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    # A line break in `text` could have opened a second key.
    return table["value"] if table.keys() == {"value"} else text


def write_toml(table: Mapping[str, Any]) -> str:
    """Nested mappings as TOML text. None becomes a comment, since TOML has no word for it."""
    return "\n".join(_table_lines(table, ())).strip("\n") + "\n"


def _table_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    """Values come first and sections after them, or they would fall into the section before."""
    lines = []
    for key, value in table.items():
        if value is None:
            lines.append(f"# {_key(key)} = none")
        elif not _is_section(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        name = ".".join(_key(part) for part in (*path, key))
        if isinstance(value, Mapping) and _is_section(value):
            lines += ["", f"[{name}]", *_table_lines(value, (*path, key))]
        elif _is_section(value):
            for entry in value:
                lines += ["", f"[[{name}]]", *_table_lines(entry, (*path, key))]
    return lines


def _is_section(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and bool(value) and all(isinstance(entry, Mapping) for entry in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(entry) for entry in value) + "]"
    raise TypeError(f"a {type(value).__name__} can't be written as TOML: {value!r}")


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is and TOML forbids.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.match(key) else _text(key)
