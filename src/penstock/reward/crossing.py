"""What crosses between a scorer and its worker processes: length-prefixed msgpack of these structs, never pickle.

A sample crosses whole, so that a reward function sees the same one in either mode. A row keeps the types that rows
have: JSON's, bytes, tuples, sets, dates, decimals and integers of any size (reasoning-gym's scorers tell a tuple from
a list). Numpy's scalars arrive as plain Python ones. Other types are refused with the field's name.
"""

from __future__ import annotations

import datetime
import decimal
import struct
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from penstock.sample import Finish, Prompt, Sample, SampleId, Score, Unscored, VersionSpan

__all__ = [
    "LENGTH",
    "Ask",
    "Done",
    "Job",
    "Ready",
    "Refused",
    "decode_job",
    "decode_reply",
    "encode",
    "job_of",
    "sample_of",
]

LENGTH = struct.Struct("<I")
"""In front of every message: its length in bytes."""

MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class Job(msgspec.Struct, array_like=True, tag="job"):
    """Score this sample. Columns as in `wire`: "i" int32 token ids, "f" float32 log-probabilities."""

    number: int
    id: tuple[str, int, int]
    prompt_text: str
    prompt_ids: bytes
    source: str
    row: dict[str, Any]
    token_ids: bytes
    logprobs: bytes
    version_spans: list[tuple[int, int, int]]
    finish: int
    response: str
    learned: bytes | None = None
    """int8."""
    turns: int = 1
    transcript: str = ""
    outcome: tuple[float, dict[str, float]] | None = None


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """Call the function with this JSON value and answer with another."""

    number: int
    body: bytes


class Ready(msgspec.Struct, tag="ready"):
    """The worker has loaded the reward function."""


class Refused(msgspec.Struct, tag="refused"):
    """The worker can't load the reward function."""

    cause: str


class Done(msgspec.Struct, tag="done"):
    """The result of one job: a value and its parts, or the cause why there is none."""

    number: int
    value: float = 0.0
    parts: dict[str, float] = {}
    cause: str | None = None
    answer: bytes | None = None
    """What an `Ask` is answered with, as JSON."""
    fault: str = ""
    """Kind and place of what was raised, where its traceback comes along."""
    traceback: str = ""
    """For the log; only of a fault that this worker has not sent before."""

    def result(self) -> Score | Unscored | bytes:
        if self.answer is not None:
            return self.answer
        return Score(self.value, self.parts) if self.cause is None else Unscored(self.cause)


Reply = Ready | Refused | Done

# Extension types for what msgpack has no word for; the numbers are this module's own.
_AS_LIST: dict[type, tuple[int, Callable[[list[Any]], Any]]] = {
    tuple: (1, tuple),
    set: (2, set),
    frozenset: (3, frozenset),
}
_AS_TEXT: dict[type, tuple[int, Callable[[Any], str], Callable[[str], Any]]] = {
    int: (4, str, int),
    datetime.datetime: (5, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (6, datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (7, datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: (8, str, decimal.Decimal),
}
_PAIRS = 9
"""A mapping whose keys are not all text, as pairs."""
_FROM_LIST = {**dict(_AS_LIST.values()), _PAIRS: dict}
_FROM_TEXT = {code: read for code, _, read in _AS_TEXT.values()}
_PLAIN = {str, float, bool, bytes, type(None)}
_PLAIN_OF: dict[type, Callable[[Any], Any]] = {
    str: str.__str__,  # not `str`, which asks the subclass: an enumeration would give its member's name
    int: int,
    float: float,
    dict: dict,
    list: list,
    tuple: tuple,
}
_INT_64 = range(-(2**63), 2**64)


def _restore(code: int, data: memoryview) -> Any:
    if code in _FROM_LIST:
        return _FROM_LIST[code](_values.decode(data))
    return _FROM_TEXT[code](str(data, "utf-8"))


_encoder = msgspec.msgpack.Encoder()
_values: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any], ext_hook=_restore)
_jobs: msgspec.msgpack.Decoder[Job | Ask] = msgspec.msgpack.Decoder(Job | Ask, ext_hook=_restore)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

decode_job = _jobs.decode
decode_reply = _replies.decode


def encode(message: Job | Ask | Reply) -> bytes:
    """One message with its length in front. Raises TypeError or ValueError for what can't be sent."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"the sample takes {len(body)} bytes, which is over the limit of {MAX_MESSAGE_BYTES}")
    return LENGTH.pack(len(body)) + body


def job_of(number: int, sample: Sample) -> bytes:
    """The message for one sample. Raises ValueError that names the row's field that can't be sent."""
    row = {}
    for name, value in sample.row.items():
        try:
            row[name] = _packable(value)
        except (TypeError, RecursionError) as error:
            cause = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ValueError(
                f"the row of {sample.prompt.source} can't be sent to a worker: its field '{name}': {cause}"
            ) from error
    job = Job(
        number,
        sample.id,
        sample.prompt.text,
        array("i", sample.prompt.token_ids).tobytes(),
        sample.prompt.source,
        row,
        sample.token_ids.tobytes(),
        sample.logprobs.tobytes(),
        list(sample.version_spans),
        int(sample.finish),
        sample.response,
        None if sample.learned is None else sample.learned.tobytes(),
        sample.turns,
        sample.transcript,
        None if sample.outcome is None else (sample.outcome.value, dict(sample.outcome.parts)),
    )
    try:
        return encode(job)
    except UnicodeEncodeError as error:
        raise ValueError(f"the row of {sample.prompt.source} can't be sent to a worker: {error}") from error


def sample_of(job: Job) -> Sample:
    """The sample as the worker's reward function gets it."""
    prompt = Prompt(job.id[1], job.prompt_text, _column("i", job.prompt_ids), job.row, job.source)
    return Sample(
        SampleId(*job.id),
        prompt,
        _column("i", job.token_ids),
        _column("f", job.logprobs),
        tuple(VersionSpan(*span) for span in job.version_spans),
        Finish(job.finish),
        job.response,
        learned=None if job.learned is None else _column("b", job.learned),
        turns=job.turns,
        transcript=job.transcript,
        outcome=None if job.outcome is None else Score(*job.outcome),
    )


def _column(code: str, data: bytes) -> array[Any]:
    column: array[Any] = array(code)
    column.frombytes(data)
    return column


def _packable(value: Any) -> Any:
    """`value` in msgpack's own types and extensions. Raises TypeError that names a type that can't be sent."""
    kind = type(value)
    if kind in _PLAIN or (kind is int and value in _INT_64):
        return value
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: _packable(item) for key, item in value.items()}
        return _extension(_PAIRS, [[key, item] for key, item in value.items()])
    if kind is list:
        return [_packable(item) for item in value]
    if kind in _AS_LIST:
        return _extension(_AS_LIST[kind][0], value)
    if kind in _AS_TEXT:
        code, write, _ = _AS_TEXT[kind]
        return msgspec.msgpack.Ext(code, write(value).encode())
    return _packable(_plain(value))


def _extension(code: int, items: Iterable[Any]) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _encoder.encode([_packable(item) for item in items]))


def _plain(value: Any) -> Any:
    """Subclasses and numpy's scalars as the plain type that they stand for."""
    for kind, plain in _PLAIN_OF.items():
        if isinstance(value, kind):
            return plain(value)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        item = value.item()
        if type(item) is not type(value):
            return item
    raise TypeError(f"values of type {type(value).__module__}.{type(value).__qualname__} can't be sent")
