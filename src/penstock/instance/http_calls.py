"""How dialects ask a server on this machine: one call with a deadline, a stream of events, a seed.

Turns an answer that is refused, no JSON or without end into an EngineError with what the server said. Knows no
server's routes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from penstock.errors import EngineError

CALL_S = 60.0
"""For one control call to be answered."""
ANSWER_BYTES = 16 * 1024 * 1024
"""Of one answer or one event: a hundred thousand tokens in the wordiest form. What is longer is not held in memory."""
SAID_CHARACTERS = 600
"""Of a refusal's text."""


async def call(
    http: aiohttp.ClientSession,
    method: str,
    url: str,
    body: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = CALL_S,
) -> Any:
    """The decoded JSON of a server's answer, None for an empty one.

    Raises EngineError with what the server said, or that it said nothing within `deadline_s`; connection errors go
    through.
    """
    data = await _answer(http, method, url, body, deadline_s)
    return parsed(data, url) if data.strip() else None


def field_of(answer: Any, name: str) -> str:
    """A text in a decoded answer. Raises EngineError where there is none."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, str):
        raise EngineError(f"the server's answer has no {name}: {str(answer)[:300]}")
    return value


async def call_text(http: aiohttp.ClientSession, url: str, *, deadline_s: float = CALL_S) -> str:
    """What a server answers to GET, as text. Raises like `call`."""
    return (await _answer(http, "GET", url, None, deadline_s)).decode(errors="replace")


async def _answer(
    http: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, deadline_s: float
) -> bytes:
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    try:
        async with http.request(method, url, json=body, timeout=timeout) as answer:
            data = await _read(answer)
    except TimeoutError:
        raise EngineError(f"{method} {url} was not answered within {deadline_s:g} s") from None
    if answer.status >= 300:
        raise EngineError(f"{method} {url} was refused (HTTP {answer.status}): {excerpt(data)}")
    return data


def metrics_in(text: str, names: Sequence[str]) -> tuple[float, ...]:
    """The named samples of a Prometheus page, those with several label sets added up; a name that is not there is 0.

    Empty where none is there.
    """
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^\n]*\})? (\S+)", text, re.MULTILINE):
        if name in names:
            with contextlib.suppress(ValueError):
                found[name] = found.get(name, 0.0) + float(value)
    return tuple(found.get(name, 0.0) for name in names) if found else ()


def parsed(data: bytes, url: str) -> Any:
    """JSON as plain values. Raises EngineError for what is none."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"{url} answered what is no JSON ({error}): {excerpt(data)}") from error


def excerpt(data: bytes) -> str:
    return data[:SAID_CHARACTERS].decode(errors="replace").strip() or "nothing"


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of each server-sent event, up to `[DONE]` or the stream's end; a last one cut short is left out.

    Raises EngineError for one that is over ANSWER_BYTES.
    """
    rest = bytearray()
    async for part in answer.content.iter_any():
        rest += part
        if b"\n" not in part:
            _check_length(len(rest), answer)
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for part in answer.content.iter_any():
        data += part
        _check_length(len(data), answer)
    return bytes(data)


def _check_length(length: int, answer: aiohttp.ClientResponse) -> None:
    if length > ANSWER_BYTES:
        raise EngineError(f"{answer.url} answered more than {ANSWER_BYTES} bytes without an end")


def request_seed(seed: int, position: int, bits: int = 63) -> int:
    """A server's seed for what follows output token `position` of the sequence with `seed`."""
    message = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> (64 - bits)
