"""Servers that answer without an end, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from penstock.errors import EngineError
from penstock.instance import http_calls
from penstock.instance.http_calls import call, events


@asynccontextmanager
async def answering(*parts: bytes, endless: bytes = b"") -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A server that sends `parts`, then `endless` for as long as somebody reads."""

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        for part in parts:
            await stream.write(part)
        try:
            while endless:
                await stream.write(endless)
        except ConnectionError:
            return stream  # The reader has had enough.
        return stream

    application = web.Application()
    application.router.add_get("/", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with aiohttp.ClientSession() as http:
            yield http, f"http://{host}:{port}/"
    finally:
        await runner.cleanup()


async def test_events_are_told_apart_wherever_the_stream_is_cut() -> None:
    parts = (b"data: o", b"ne\n", b"\ndata: two\n\n: a comment\ndata:", b"three\n\ndata: [DONE]\n", b"data: late\n")
    async with answering(*parts) as (http, url), http.get(url) as answer:
        assert [data async for data in events(answer)] == [b"one", b"two", b"three"]


async def test_an_event_without_an_end_is_not_read_into_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "ANSWER_BYTES", 100_000)
    async with answering(b"data: one\n\ndata: ", endless=b"x" * 1000) as (http, url), http.get(url) as answer:
        stream = events(answer)
        assert await anext(stream) == b"one"
        with pytest.raises(EngineError, match="more than 100000 bytes without an end"):
            await anext(stream)


async def test_an_answer_without_an_end_is_not_read_into_memory_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_calls, "ANSWER_BYTES", 100_000)
    async with answering(endless=b"[" * 1000) as (http, url):
        with pytest.raises(EngineError, match="more than 100000 bytes without an end"):
            await call(http, "GET", url)
