"""Rows out of a source: JSONL, Parquet, a Hugging Face data set on disk, or a reasoning-gym task.

Decides what a well-formed row is and says where each one came from. Knows neither tokenizers nor templates. A row
that is malformed ends the reading with a DataError that names file and line: a prompt left out without a word would
change what a run learns.
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from penstock.errors import DataError, MissingExtra

__all__ = ["Message", "Row", "Source", "read_source"]

Message = Mapping[str, str]
"""One chat message: `role` and `content`."""

PARQUET_BATCH_ROWS = 1024
SHOWN_CHARACTERS = 60


class Source(Protocol):
    """What a source's configuration must say; `config.run.SourceConfig` does."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def prompt_field(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


class Row(NamedTuple):
    """One well-formed row."""

    question: str | list[Message]
    """Text, or chat messages."""
    fields: Mapping[str, Any]
    """All fields of the row, for the reward function."""
    where: str
    """`file:line`, `file[row]` or `task[item]`."""


def read_source(source: Source) -> Iterator[Row]:
    """Yields at most `source.size` rows in the source's order.

    Raises DataError (missing, empty or malformed; names file and line) or MissingExtra.
    """
    reader = _READERS.get(source.kind)
    if reader is None:
        raise DataError(f"a source's kind is '{source.kind}'; it must be one of {', '.join(_READERS)}")
    if not source.path:
        raise DataError(f"a source of kind '{source.kind}' has no path")
    field = "question" if source.kind == "reasoning_gym" else source.prompt_field
    read = 0
    for fields, where in itertools.islice(reader(source), source.size):
        yield Row(_question(fields, field, where), fields, where)
        read += 1
    if read == 0:
        raise DataError(f"{source.path} has no rows")


def _jsonl(source: Source) -> Iterator[tuple[Mapping[str, Any], str]]:
    path = _existing(source.path, "JSONL file")
    if path.is_dir():
        raise DataError(f"{path} is a folder; kind 'jsonl' wants a file")
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield _json_object(line, where), where
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error


def _json_object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        text = line.rstrip(b"\r\n").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: byte {error.start} is 0x{line[error.start]:02x}") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise DataError(f"{where}: JSON nested too deeply") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: a row must be a JSON object, and this is {_kind(value)}")
    return value


def _parquet(source: Source) -> Iterator[tuple[Mapping[str, Any], str]]:
    path = _existing(source.path, "Parquet file")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "train", "reading Parquet files") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield row, f"{path}[{number}]"
                    number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file (after row {number}): {_first_line(error)}") from error


def _hf(source: Source) -> Iterator[tuple[Mapping[str, Any], str]]:
    path = _existing(source.path, "data set folder")
    try:
        import datasets
    except ImportError as error:
        raise MissingExtra("datasets", "datasets", "reading Hugging Face data sets") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a data set written by datasets' save_to_disk: {_first_line(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(str(path / name) for name in loaded)
        raise DataError(f"{path} holds several splits; give the path of one: {splits}")
    for number, row in enumerate(loaded):
        yield row, f"{path}[{number}]"


def _reasoning_gym(source: Source) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Items carry `task_options`, so that the verifier scores with the settings that the item was made with."""
    task = source.path
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise MissingExtra("reasoning-gym", "train", f"the task '{task}'") from error
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {len(DATASETS)} tasks, such as chain_sum"
        raise DataError(f"reasoning-gym has no task '{task}'; {hint}")
    if source.size is None:
        raise DataError(f"the reasoning-gym task '{task}' has no end of its own; set the source's size")
    options = dict(source.options)
    try:
        items = reasoning_gym.create_dataset(task, size=source.size, seed=source.seed, **options)
    except (TypeError, ValueError, AssertionError, KeyError, OSError) as error:
        raise DataError(
            f"the reasoning-gym task '{task}' refuses the options {options}: {_first_line(error)}"
        ) from error
    for number in range(source.size):
        where = f"{task}[{source.seed + number}]"
        try:
            item = items[number]
        except Exception as error:
            raise DataError(f"{where}: the task failed to make this item: {_first_line(error)}") from error
        yield {**item, "task_options": options}, where


_READERS: dict[str, Callable[[Source], Iterator[tuple[Mapping[str, Any], str]]]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "hf": _hf,
    "reasoning_gym": _reasoning_gym,
}


def _question(fields: Mapping[str, Any], field: str, where: str) -> str | list[Message]:
    """The question in `field`: non-empty text or a list of chat messages."""
    if field not in fields:
        names = ", ".join(f"'{name}'" for name in fields) or "none"
        raise DataError(f"{where}: no field '{field}'; the row's fields are {names}. Set the source's prompt_field")
    value = fields[field]
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the field '{field}' is empty")
        return _unicode(value, field, where)
    if isinstance(value, list):
        return _messages(value, field, where)
    raise DataError(f"{where}: the field '{field}' must be text or a list of chat messages, and is {_kind(value)}")


def _messages(value: list[Any], field: str, where: str) -> list[Message]:
    if not value:
        raise DataError(f"{where}: the field '{field}' is an empty list of chat messages")
    messages: list[Message] = []
    for number, message in enumerate(value):
        name = f"{where}: chat message {number} of '{field}'"
        if not isinstance(message, dict):
            raise DataError(f"{name} must be an object with role and content, and is {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                found = _kind(message[key]) if key in message else "missing"
                raise DataError(f"{name}: '{key}' must be text, and is {found}")
        if not message["role"].strip():
            raise DataError(f"{name}: 'role' is empty")
        messages.append({key: _unicode(message[key], field, where) for key in ("role", "content")})
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where}: all chat messages of '{field}' are empty")
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: the last chat message of '{field}' is the assistant's; there is nothing to answer")
    return messages


def _unicode(text: str, field: str, where: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the field '{field}' holds half of a surrogate pair at character {error.start}"
        ) from error
    return text


def _existing(path: str, what: str) -> Path:
    found = Path(path)
    if not found.exists():
        raise DataError(
            f"there is no {what} {path} (looked in {Path.cwd()})"
            if not found.is_absolute()
            else f"there is no {what} {path}"
        )
    return found


def _kind(value: Any) -> str:
    """What `value` is, for a person: its JSON type and a little of it."""
    if value is None:
        return "null"
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= SHOWN_CHARACTERS else shown[:SHOWN_CHARACTERS] + '…'}"


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
