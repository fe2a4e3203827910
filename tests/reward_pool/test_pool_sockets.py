"""The pool over real sockets: what passes through, what each fault becomes, and what a shut-down leaves."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest

from penstock.errors import ConfigError, PoolError
from penstock.reward.failures import BudgetSpent, DeadlinePassed, JobFailed, JobTooLarge, NoEndpoint, PoolClosed
from penstock.reward.limits import Endpoint, PoolConfig, PoolOptions
from penstock.reward.pool import ComputePool
from penstock.reward.report import AttemptEnded, prometheus_text
from penstock.reward.retry import Kind, Outcome
from penstock.reward.transport import FunctionTransport, HttpTransport, Reply
from penstock.simulate.provider_server import ProviderServer
from penstock.simulate.providers import Provider

USER = [{"role": "user", "content": "hello"}]
ONCE = PoolOptions(attempts=1, timeout_s=20)


async def ask(pool: ComputePool, content: str = "hello", **params) -> str:
    answer = await pool.chat(model="m", messages=[{"role": "user", "content": content}], **params)
    return answer["choices"][0]["message"]["content"]


async def test_every_parameter_goes_out_and_every_field_comes_back() -> None:
    params = {
        "temperature": 0.5,
        "max_tokens": 9,
        "logprobs": True,
        "response_format": {"type": "json_object"},
        "seed": 3,
        "vendor_option": {"a": [1, None]},
    }
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        answer = await pool.chat(model="m", messages=USER, **params)
        path, body = server.seen[0]
    assert path == "/chat/completions"
    assert body == {"model": "m", "messages": USER, **params}
    assert answer["usage"]["total_tokens"] == 7
    assert answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    assert answer["asked"]["vendor_option"] == {"a": [1, None]}


async def test_the_other_services_are_reached_where_servers_have_them() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        assert len((await pool.embeddings(model="e", input=["a", "bb"]))["data"]) == 2
        assert (await pool.completions(model="c", prompt="p"))["choices"][0]["text"] == "echo: p"
        assert (await pool.classify(model="rm", input=["abc"]))["data"][0]["score"] == 3.0
        assert (await pool.score(model="rm", text_1="q", text_2=["a"]))["data"][0]["score"] == 1.0
        assert (await pool.rerank(model="rm", query="q", documents=["a", "b"]))["results"][1]["index"] == 1


async def test_answers_belong_to_their_questions_and_connections_are_used_again() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=8)]) as pool:
        answers = await asyncio.gather(*(ask(pool, f"q{n}") for n in range(200)))
        assert answers == [f"echo: q{n}" for n in range(200)]
        assert server.connections <= 8
        assert server.most_in_flight <= 8


async def test_a_model_can_have_another_name_at_an_endpoint() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, rename={"m": "m-2026"})]) as pool:
        assert (await pool.chat(model="m", messages=USER))["model"] == "m-2026"


async def test_keys_and_headers_are_sent_and_the_key_is_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    caplog.set_level(logging.DEBUG)
    events: list[AttemptEnded] = []
    async with ProviderServer(key="s3cret") as server:
        endpoint = Endpoint(server.url, api_key_env="JUDGE_KEY", headers={"x-team": "rl"})
        async with ComputePool([endpoint], on_event=events.append) as pool:
            assert await ask(pool) == "echo: hello"
            text = repr(events) + repr(pool.snapshot()) + repr(endpoint) + prometheus_text(pool.snapshot(), 0)
        monkeypatch.setenv("JUDGE_KEY", "wr0ng")
        async with ComputePool([endpoint], ONCE) as pool:
            with pytest.raises(JobFailed, match="HTTP 401") as error:
                await ask(pool)
    assert "s3cret" not in text + caplog.text
    assert "wr0ng" not in str(error.value) + caplog.text


@pytest.mark.parametrize("status", [401, 200])
async def test_a_service_that_quotes_the_key_is_not_quoted(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    padding = "x" * 470  # the text is shown up to 500 characters: the key must not be cut in two before it is taken out

    async def quote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        key = asked.partition(b"Bearer ")[2].partition(b"\r\n")[0].decode()
        body = f'{{"error": "{padding} no such key: {key}"}}'
        writer.write(f"HTTP/1.1 {status} Quoted\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(quote, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    events: list[AttemptEnded] = []
    async with ComputePool([Endpoint(url, api_key_env="JUDGE_KEY")], ONCE, on_event=events.append) as pool:
        with pytest.raises(JobFailed, match=f"HTTP {status}") as error:
            await ask(pool)
    server.close()
    assert events
    assert "no such key: " in error.value.body
    assert "s3c" not in repr(events) + str(error.value) + error.value.body


async def test_a_declared_rate_is_kept_and_a_429_sends_nothing_to_sleep_for_long() -> None:
    async with ProviderServer(Provider(rate=200, burst=10, median_s=0.0)) as server:
        async with ComputePool([Endpoint(server.url, requests_per_minute=11_000, burst=5)]) as pool:
            await asyncio.gather(*(ask(pool) for _ in range(100)))
        assert server.provider.refused <= 40, "sent all at once, ninety would be"


async def test_an_undeclared_limit_is_found() -> None:
    async with ProviderServer(Provider(rate=200, burst=10, median_s=0.02)) as server:
        async with ComputePool([Endpoint(server.url)]) as pool:
            answers = await asyncio.gather(*(ask(pool, str(n)) for n in range(300)))
            assert answers == [f"echo: {n}" for n in range(300)]
        assert server.provider.refused <= 300, "how many is the virtual suite's to say; here the clock is the machine's"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("reset", "body cut off|reset"),
        ("truncated", "body cut off"),
        ("bad-json", "answer is not JSON"),
        ("500", "HTTP 500"),
        ("400", "HTTP 400.*told to answer 400"),
        ("error-in-200", "HTTP 200 with an error.*model crashed"),
        ("closed", "closed without an answer"),
        ("silent", "no answer within 0.3 s"),
        ("drip", "no answer within 0.3 s"),
    ],
)
async def test_each_fault_has_its_name(fault: str, says: str) -> None:
    async with ProviderServer() as server:
        hasty = Endpoint(server.url, name="hasty", models=("fault-silent", "fault-drip"), timeout_s=0.3)
        rest = Endpoint(server.url, name="rest", models=("m", "fault-[!sd]*"), timeout_s=60)
        pool = ComputePool([hasty, rest], PoolOptions(attempts=1))
        with pytest.raises(JobFailed, match=says):
            await pool.chat(model=f"fault-{fault}", messages=USER)
        assert await ask(pool) == "echo: hello", "the next job is none the worse"
        assert pool.running == 0
        await pool.close()


@pytest.mark.parametrize("fault", ["429", "529", "silent"])
async def test_a_service_that_never_gives_way_ends_at_the_deadline(fault: str) -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        with pytest.raises(DeadlinePassed):
            await pool.chat(model=f"fault-{fault}", messages=USER, deadline_s=0.3)
        assert server.requests <= 12, "and isn't hammered until then"
        await asyncio.sleep(0)
        assert pool.running == 0


@pytest.mark.parametrize("fault", ["429-once", "429-retry-after"])
async def test_work_turned_away_comes_back(fault: str) -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], ONCE) as pool:
        answer = await pool.chat(model=f"fault-{fault}", messages=USER)
        assert answer["choices"][0]["message"]["content"] == "echo: hello"
        assert server.requests == 2


async def test_a_spent_account_is_named() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        with pytest.raises(BudgetSpent, match="no other account"):
            await pool.chat(model="fault-spent", messages=USER)
        assert server.requests == 1


async def test_an_endpoint_that_is_not_there_is_routed_around() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        events: list[AttemptEnded] = []
        async with ProviderServer() as server:
            async with ComputePool([Endpoint(dead), Endpoint(server.url)], on_event=events.append) as pool:
                answers = await asyncio.gather(*(ask(pool, str(n)) for n in range(100)))
    assert answers == [f"echo: {n}" for n in range(100)]
    broken = [event for event in events if event.kind == Kind.BROKEN.value]
    assert all("can't connect" in event.cause for event in broken)
    per_job = [event.job for event in broken]
    assert len(per_job) == len(set(per_job)), "a dead endpoint costs a job at most one attempt"


async def test_a_server_that_is_started_again_loses_no_job() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    server = ProviderServer()
    server.port = port
    async with ComputePool([Endpoint(f"http://127.0.0.1:{port}/v1")], PoolOptions(breaker_pause_s=0.1)) as pool:
        tasks = [asyncio.create_task(ask(pool, str(n))) for n in range(10)]
        while pool.snapshot()[0].health == "closed":
            await asyncio.sleep(0.005)
        async with server:
            assert await asyncio.gather(*tasks) == [f"echo: {n}" for n in range(10)]


async def test_a_name_that_does_not_resolve_is_named() -> None:
    async with ComputePool([Endpoint("http://no-such-host.invalid/v1", connect_timeout_s=5)], ONCE) as pool:
        with pytest.raises(JobFailed, match=r"name look-up failed|no connection in time"):
            await ask(pool)


async def test_a_name_server_that_never_answers_is_part_of_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> list:
        await asyncio.get_running_loop().create_future()
        return []

    monkeypatch.setattr(aiohttp.DefaultResolver, "resolve", never)
    async with ComputePool([Endpoint("http://judge.example/v1", connect_timeout_s=0.2, timeout_s=600)], ONCE) as pool:
        with pytest.raises(JobFailed, match="no connection in time"):
            await ask(pool)


async def test_the_time_to_connect_is_bounded_apart_from_the_time_to_answer() -> None:
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for filler in (first, second):  # nobody accepts, so further connections are left hanging
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        async with ComputePool([Endpoint(url, connect_timeout_s=0.2, timeout_s=60)], ONCE) as pool:
            with pytest.raises(JobFailed, match="no connection in time"):
                await ask(pool)


async def test_the_pools_own_deadline_holds_where_a_call_names_none() -> None:
    async with ProviderServer() as server:
        async with ComputePool([Endpoint(server.url)], PoolOptions(timeout_s=0.2)) as pool:
            with pytest.raises(DeadlinePassed):
                await pool.chat(model="fault-silent", messages=USER)


async def test_a_certificate_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    made = await asyncio.to_thread(
        subprocess.run,
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        + ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")],
        capture_output=True,
    )
    if made.returncode:
        pytest.skip("openssl can't make a certificate here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with ComputePool([Endpoint(f"https://127.0.0.1:{port}/v1")], ONCE) as pool:
        with pytest.raises(JobFailed, match="TLS failed"):
            await ask(pool)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    trusting.check_hostname = False
    async with ComputePool([Endpoint(f"https://127.0.0.1:{port}/v1")], ONCE, http=HttpTransport(trusting)) as pool:
        with pytest.raises(JobFailed, match="closed without an answer"):
            await ask(pool)
    server.close()


async def test_a_stream_comes_piece_by_piece() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        body = {"model": "m", "messages": USER}
        pieces = [piece["choices"][0]["delta"]["content"] async for piece in pool.stream("/chat/completions", body)]
        assert pieces == [f"hello {n} " for n in range(5)]
        assert server.seen[0][1]["stream"] is True
        assert pool.running == 0


@pytest.mark.parametrize(
    ("fault", "says"), [("error-in-200", "HTTP 200 with an error.*model crashed"), ("429-once", "a whole answer came")]
)
async def test_a_stream_that_is_none_is_no_empty_answer(fault: str, says: str) -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], ONCE) as pool:
        with pytest.raises(JobFailed, match=says):
            _ = [
                piece async for piece in pool.stream("/chat/completions", {"model": f"fault-{fault}", "messages": USER})
            ]


async def test_a_stream_that_says_what_it_cost_is_charged_that() -> None:
    async def streamed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for piece in (b'data: {"choices": [{}]}\n\ndata: {"choices": [], "usa', b'ge": {"total_tokens": 40}}\n\n'):
            writer.write(piece)
            await writer.drain()
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(streamed, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    events: list[AttemptEnded] = []
    endpoint = Endpoint(url, price_per_1k_tokens=1.0, tokens_per_minute=60_000)
    async with ComputePool([endpoint], ONCE, on_event=events.append) as pool:
        for _ in range(3):  # by the estimate of half a minute's worth each, the second would wait for as long
            body = {"model": "m", "messages": USER, "max_tokens": 29_000}
            assert len([piece async for piece in pool.stream("/chat/completions", body, deadline_s=20)]) == 2
        assert pool.spent == pytest.approx(0.12)
    assert [event.tokens for event in events] == [40.0] * 3
    server.close()


async def breaking_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b'd\r\ndata: {"n":1}\r\n1\r\n\n\r\n')
    await writer.drain()
    writer.transport.abort()


async def test_a_stream_that_breaks_off_is_said_to_have_and_not_begun_again() -> None:
    server = await asyncio.start_server(breaking_off, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    events: list[AttemptEnded] = []
    pieces: list[dict] = []

    async def read(pool: ComputePool) -> None:
        async for piece in pool.stream("/chat/completions", {"model": "m"}):
            pieces.append(piece)

    async with ComputePool([Endpoint(url)], on_event=events.append) as pool:
        with pytest.raises(JobFailed, match="stream broke off"):
            await read(pool)
    assert pieces == [{"n": 1}]
    assert [event.kind for event in events] == ["final"]
    server.close()


async def test_a_stream_can_be_read_on_any_loop_and_its_options_hold() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, tokens_per_minute=60_000)]) as pool:
        body = {"model": "m", "messages": USER}

        async def read(**options) -> list[str]:
            pieces = pool.stream("/chat/completions", body, **options)
            return [piece["choices"][0]["delta"]["content"] async for piece in pieces]

        assert await asyncio.to_thread(lambda: asyncio.run(read())) == [f"hello {n} " for n in range(5)]
        with pytest.raises(JobTooLarge, match="60001 tokens"):
            await asyncio.to_thread(lambda: asyncio.run(read(estimated_tokens=60_001)))

        async def leave() -> None:
            stream = pool.stream("/chat/completions", {**body, "model": "other"})
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]

        await asyncio.to_thread(lambda: asyncio.run(leave()))
        while pool.running:
            await asyncio.sleep(0.005)
        before = server.requests
        body["model"] = "fault-500"
        with pytest.raises(JobFailed, match="attempt 1 of 1"):
            _ = [piece async for piece in pool.stream("/chat/completions", body, attempts=1, estimated_tokens=1)]
        assert server.requests == before + 1


async def test_any_answer_of_success_is_one() -> None:
    async def created(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 201 Created\r\ncontent-length: 8\r\n\r\n{"id":1}')
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(created, "127.0.0.1", 0)
    async with ComputePool([Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")], ONCE) as pool:
        reply = await pool.request("/jobs", {"model": "m"})
        assert (reply.value, reply.status) == ({"id": 1}, 201)
    server.close()


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("priority", float("nan"), "priority = nan: must be a finite number"),
        ("priority", float("inf"), "priority = inf: must be a finite number"),
        ("priority", "high", "priority = 'high': must be a finite number"),
        ("deadline_s", float("nan"), "deadline_s = nan: must be a number of seconds"),
        ("attempts", 0, "attempts = 0: must be a whole number from 1"),
        ("hedge_after_s", -1.0, "hedge_after_s = -1.0: must be above 0"),
        ("estimated_tokens", float("nan"), "estimated_tokens = nan: must be a finite number from 0"),
    ],
)
async def test_an_option_of_a_call_that_cannot_be_is_refused_and_the_queue_stays_in_order(
    option: str, value: object, says: str
) -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)]) as pool:
        others = [asyncio.create_task(ask(pool, str(n))) for n in range(3)]
        await server.arrived(1)
        with pytest.raises(ConfigError, match=re.escape(says)):
            await ask(pool, **{option: value})
        assert await asyncio.gather(*others) == ["echo: 0", "echo: 1", "echo: 2"]
        assert pool.waiting == pool.running == 0
        with pytest.raises(DeadlinePassed):
            await ask(pool, deadline_s=-1)


async def test_a_calls_own_options_hold_for_it_alone_and_are_not_sent() -> None:
    patient = PoolOptions(breaker_failures=100)
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)], patient) as pool:
        with pytest.raises(JobFailed, match="attempt 2 of 2"):
            await pool.chat(model="fault-500", messages=USER, attempts=2)
        assert server.requests == 2
        with pytest.raises(JobFailed, match="attempt 4 of 4"):
            await pool.chat(model="fault-500", messages=USER)
        first = asyncio.create_task(pool.chat(model="fault-silent", messages=USER))
        await server.arrived(7)
        low = asyncio.create_task(pool.chat(model="low", messages=USER, temperature=0.5))
        high = asyncio.create_task(pool.chat(model="high", messages=USER, priority=3, deadline_s=60))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(low, high)
        (_, second), (_, third) = server.seen[-2:]
        assert second == {"model": "high", "messages": USER}
        assert third == {"model": "low", "messages": USER, "temperature": 0.5}


async def test_a_key_goes_where_its_service_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(note, "127.0.0.1", 0)
    monkeypatch.setenv("JUDGE_KEY", "s3cret\n")
    endpoint = Endpoint(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key_env="JUDGE_KEY", api_key_header="x-api-key"
    )
    async with ComputePool([endpoint], ONCE) as pool:
        await ask_raw(pool)
    server.close()
    assert "\r\nx-api-key: s3cret\r\n" in asked[0]
    assert "authorization" not in asked[0]


async def ask_raw(pool: ComputePool) -> object:
    return (await pool.request("/x", {"model": "m"})).value


async def test_leaving_a_stream_gives_its_place_back() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)]) as pool:
        stream = pool.stream("/chat/completions", {"model": "m", "messages": USER})
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        assert await ask(pool) == "echo: hello"


async def test_streams_are_not_asked_for_by_the_wrong_door() -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9/v1")]) as pool:
        with pytest.raises(ConfigError, match=r"use ComputePool\.stream"):
            await ask(pool, stream=True)


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)]) as pool:
        running = asyncio.create_task(pool.chat(model="fault-silent", messages=USER))
        waiting = asyncio.create_task(ask(pool))
        await server.arrived(1)
        waiting.cancel()
        running.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert pool.waiting == 0
        assert await ask(pool, deadline_s=5) == "echo: hello", "the only place was given back"


async def test_shutting_down_fails_what_waits_and_waits_for_what_runs() -> None:
    provider = Provider(median_s=0.2, spread=0.0, round_trip_s=0.0)
    async with ProviderServer(provider) as server:
        pool = ComputePool([Endpoint(server.url, concurrency=1)])
        tasks = [asyncio.create_task(ask(pool)) for _ in range(2)]
        await server.arrived(1)
        await pool.close(grace_s=5)
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        assert first == "echo: hello"
        assert isinstance(second, PoolClosed)
        with pytest.raises(PoolClosed):
            await ask(pool)
        late = ComputePool([Endpoint(server.url)])
        task = asyncio.create_task(ask(late))
        await server.arrived(2)
        await late.close()
        with pytest.raises(PoolClosed):
            await task


async def test_local_functions_are_endpoints_like_the_rest() -> None:
    inside = 0
    most = 0

    async def sandbox(body: dict) -> dict:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.005)
        inside -= 1
        if body["code"] == "bad":
            raise ValueError("no such code")
        return {"passed": True}

    def blocking(body: dict) -> int:
        return threading.get_ident()

    pool = ComputePool(
        [Endpoint("local:sandbox", models=("code",), concurrency=2), Endpoint("local:thread", models=("t",))],
        transports={"local:sandbox": FunctionTransport(sandbox), "local:thread": FunctionTransport(blocking)},
    )
    async with pool:
        replies = await asyncio.gather(*(pool.request("/run", {"model": "code", "code": n}) for n in range(10)))
        assert all(reply.value == {"passed": True} for reply in replies)
        assert most == 2
        with pytest.raises(JobFailed, match="ValueError: no such code"):
            await pool.request("/run", {"model": "code", "code": "bad"})
        assert (await pool.request("/run", {"model": "t"})).value != threading.get_ident()
    with pytest.raises(ConfigError, match="no transport is given for 'local:gone'"):
        ComputePool([Endpoint("local:gone")])


async def test_as_many_sync_local_functions_run_as_their_endpoint_allows() -> None:
    together = threading.Barrier(40)
    pool = ComputePool(
        [Endpoint("local:f", concurrency=40)],
        transports={"local:f": FunctionTransport(lambda body: together.wait(60))},
    )
    async with pool:
        replies = await asyncio.gather(*(pool.request("/f", {}) for _ in range(40)))
    assert sorted(reply.value for reply in replies) == list(range(40))


async def test_an_object_with_an_async_call_is_a_local_function_too() -> None:
    class Judge:
        async def __call__(self, body: dict) -> int:
            return threading.get_ident()

    async with ComputePool([Endpoint("local:f")], transports={"local:f": FunctionTransport(Judge())}) as pool:
        assert (await pool.request("/f", {})).value == threading.get_ident()


async def test_callers_on_other_loops_and_threads_share_the_limits() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=2)]) as pool:

        def elsewhere(n: int) -> list[str]:
            async def several() -> list[str]:
                return list(await asyncio.gather(*(ask(pool, f"{n}.{k}") for k in range(10))))

            return asyncio.run(several())

        answers = await asyncio.gather(*(asyncio.to_thread(elsewhere, n) for n in range(3)))
        assert answers == [[f"echo: {n}.{k}" for k in range(10)] for n in range(3)]
        assert server.most_in_flight <= 2


def test_a_pool_outlives_the_loop_it_was_first_used_on() -> None:
    pool = ComputePool([Endpoint("local:f")], transports={"local:f": FunctionTransport(lambda body: body["x"])})

    async def one(x: int) -> int:
        return (await pool.request("/f", {"x": x})).value

    assert [asyncio.run(one(n)) for n in range(3)] == [0, 1, 2]


LEFT_OPEN = """
import asyncio, sys, threading
from penstock.reward import ComputePool, Endpoint
from penstock.simulate.provider_server import ProviderServer

def in_a_thread(work):
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, loop).result(60)

server = ProviderServer()
in_a_thread(server.start())

async def asked(pool):
    return (await pool.chat(model="m", messages=[{"role": "user", "content": "x"}]))["choices"][0]["message"]["content"]

async def forgotten():
    answer = await asked(ComputePool([Endpoint(server.url)]))
    await asyncio.sleep(0)
    return answer

pool, other, third = (ComputePool([Endpoint(server.url)]) for _ in range(3))
print(*(asyncio.run(asked(pool)) for _ in range(3)), in_a_thread(asked(other)), asyncio.run(forgotten()), sep=",")
loop = asyncio.new_event_loop()
print(loop.run_until_complete(asked(third)))
"""


def test_a_pool_goes_from_loop_to_loop_and_one_left_open_ends_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-X", "dev", "-c", LEFT_OPEN], capture_output=True, text=True, timeout=120)
    assert done.stdout == ",".join(["echo: x"] * 5) + "\necho: x\n", done.stderr
    # That a callback took long is a busy machine's word, and development mode tells it.
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("Executing <"))
    assert "aiohttp" not in said
    assert "client" not in said.lower()


async def test_a_reload_changes_limits_and_loses_no_job(tmp_path: Path) -> None:
    provider = Provider(median_s=0.01, round_trip_s=0.0)
    async with ProviderServer(provider) as server, ComputePool([Endpoint(server.url, concurrency=1, name="a")]) as pool:
        tasks = [asyncio.create_task(ask(pool, str(n))) for n in range(50)]
        await asyncio.sleep(0)
        (tmp_path / "bad.toml").write_text("[[endpoints]]\nurl = 3\n")
        with pytest.raises(ConfigError):
            pool.reload(tmp_path / "bad.toml")
        pool.reload(PoolConfig((Endpoint(server.url, concurrency=20, name="a"),)))
        assert await asyncio.gather(*tasks) == [f"echo: {n}" for n in range(50)]
        assert server.most_in_flight > 1
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\nname = "b"\nmodels = ["other"]\n')
        pool.reload(tmp_path / "pool.toml")
        with pytest.raises(NoEndpoint):
            await ask(pool)


async def test_a_reload_reads_keys_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0ld")
    async with ProviderServer(key="n3w") as server:
        endpoint = Endpoint(server.url, api_key_env="JUDGE_KEY")
        async with ComputePool([endpoint], ONCE) as pool:
            with pytest.raises(JobFailed, match="HTTP 401"):
                await ask(pool)
            monkeypatch.setenv("JUDGE_KEY", "n3w")
            pool.reload(PoolConfig((endpoint,), ONCE))
            assert await ask(pool) == "echo: hello"


async def test_a_caller_may_know_better_how_many_tokens_its_request_has() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, tokens_per_minute=100)]) as pool:
        body = {"model": "m", "messages": USER, "max_tokens": 500}
        with pytest.raises(JobTooLarge, match=r"5\d\d tokens"):
            await pool.request("/chat/completions", body)
        assert (await pool.request("/chat/completions", body, estimated_tokens=20)).status == 200
        with pytest.raises(JobTooLarge, match="101 tokens"):
            await ask(pool, estimated_tokens=101)


async def test_a_reload_does_not_forget_what_was_sent_in_the_last_minute() -> None:
    async with ProviderServer() as server:
        async with ComputePool([Endpoint(server.url, requests_per_minute=10, burst=10, name="a")]) as pool:
            await asyncio.gather(*(ask(pool) for _ in range(10)))
            pool.reload(PoolConfig((Endpoint(server.url, requests_per_minute=12, burst=12, name="a"),)))
            with pytest.raises(DeadlinePassed):
                await asyncio.gather(*(ask(pool, deadline_s=0.3) for _ in range(4)))
        assert server.requests <= 12


async def test_waiting_jobs_whose_model_is_no_longer_served_fail_by_name() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)]) as pool:
        running = asyncio.create_task(pool.chat(model="fault-silent", messages=USER))
        waiting = asyncio.create_task(ask(pool))
        await server.arrived(1)
        pool.reload(PoolConfig((Endpoint(server.url, models=("other",)),)))
        with pytest.raises(NoEndpoint):
            await waiting
        running.cancel()


async def test_events_and_rows_tell_what_happened() -> None:
    events: list[AttemptEnded] = []
    async with ProviderServer() as server:
        endpoint = Endpoint(server.url, name="judge", price_per_1k_tokens=2.0)
        async with ComputePool([endpoint], on_event=events.append) as pool:
            await ask(pool)
            (row,) = pool.snapshot()
            assert (row.endpoint, row.done, row.in_flight) == ("judge", 1, 0)
            assert row.spent == pytest.approx(0.014)
            assert 'penstock_pool_done_total{endpoint="judge"} 1' in prometheus_text([row], pool.waiting)
    (event,) = events
    assert (event.endpoint, event.kind, event.status, event.tokens) == ("judge", "done", 200, 7.0)


async def test_a_listener_that_raises_loses_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: AttemptEnded) -> None:
        raise RuntimeError("listener")

    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], on_event=broken) as pool:
        assert await ask(pool) == "echo: hello"
    assert "a listener of a compute pool raised" in caplog.text


async def test_a_request_that_is_no_json_fails_alone() -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9/v1")]) as pool:
        with pytest.raises(PoolError, match="can't be written as JSON"):
            await ask(pool, when=object())
        assert pool.waiting == pool.running == 0


async def test_a_pool_left_open_leaks_no_task() -> None:
    async with ProviderServer() as server:
        pool = ComputePool([Endpoint(server.url)])
        before = len(asyncio.all_tasks())
        await asyncio.gather(*(ask(pool) for _ in range(20)))
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == before
        await pool.close()
        gc.collect()


def test_two_endpoints_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two endpoints are called 'a'"):
        ComputePool([Endpoint("http://a", name="a"), Endpoint("http://b", name="a")])
    with pytest.raises(ConfigError, match="at least one endpoint"):
        ComputePool([])


def test_a_transport_of_the_users_own_can_replace_http() -> None:
    class Recorded(HttpTransport):
        sent = 0

        async def send(self, endpoint, request, timeout_s, chunk):
            self.sent += 1
            return await FunctionTransport(lambda body: {"choices": []}).send(endpoint, request, timeout_s, chunk)

    http = Recorded()

    async def one() -> None:
        async with ComputePool([Endpoint("https://never.example")], http=http) as pool:
            await pool.chat(model="m", messages=USER)

    asyncio.run(one())
    assert http.sent == 1


async def test_a_users_hook_decides_what_an_answer_or_an_error_means() -> None:
    seen: list[tuple[int, str]] = []

    def classify(outcome: Outcome, reply: Reply | None) -> Kind | None:
        seen.append((outcome.status, type(outcome.error).__name__))
        if reply is not None and "hello" in reply.value["choices"][0]["message"]["content"]:
            return Kind.BROKEN if len(seen) == 1 else None
        return Kind.FINAL if isinstance(outcome.error, aiohttp.ServerDisconnectedError) else None

    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], classify=classify) as pool:
        assert await ask(pool) == "echo: hello"
        assert server.requests == 2, "an answer that the hook calls broken is asked for again"
        with pytest.raises(JobFailed, match="closed without an answer"):
            await pool.chat(model="fault-closed", messages=USER)
        assert server.requests == 3, "and an error that it calls final is not"
    assert seen == [(200, "NoneType"), (200, "NoneType"), (0, "ServerDisconnectedError")]


async def test_a_hook_that_raises_fails_its_job_by_name() -> None:
    def classify(outcome: Outcome, reply: Reply | None) -> Kind | None:
        raise RuntimeError("hook")

    async with ProviderServer() as server, ComputePool([Endpoint(server.url)], ONCE, classify=classify) as pool:
        with pytest.raises(JobFailed, match="RuntimeError: hook"):
            await ask(pool)


async def test_attempts_are_made_in_the_callers_own_task_and_the_pool_cancels_none_of_its_own_accord() -> None:
    tasks: list[object] = []

    async def slow_once(body: dict) -> str:
        tasks.append(asyncio.current_task())
        if len(tasks) == 1:
            await asyncio.sleep(60)
        return "answer"

    pool = ComputePool([Endpoint("local:f")], transports={"local:f": FunctionTransport(slow_once)})
    async with pool:
        pool.reload(PoolConfig((Endpoint("local:f"),), PoolOptions(hedge_share=1.0)))
        reply = await pool.request("/f", {}, hedge_after_s=0.01)
        mine = asyncio.current_task()
        assert reply.value == "answer"
        assert tasks[0] is mine
        assert tasks[1] is not mine, "a hedge has a task of its own"
        assert mine is not None
        assert mine.cancelling() == 0, "the attempt that lost is cancelled, the caller is not"


async def test_a_caller_cancelled_as_its_attempt_is_granted_gives_the_place_back() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url, concurrency=1)]) as pool:
        first = asyncio.create_task(pool.chat(model="fault-silent", messages=USER))
        second = asyncio.create_task(ask(pool))
        await server.arrived(1)
        first.cancel()
        while pool.running:  # the first lets go, and in the same step the second is granted its place
            await asyncio.sleep(0)
            second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert await ask(pool, deadline_s=20) == "echo: hello"


def test_a_pool_works_on_uvloop_whose_handles_know_no_time() -> None:
    """Engines and trainers that a pool is used from run on uvloop; where a time has come, its handle has no `when`."""
    import uvloop

    async def judge(body: dict) -> int:
        await asyncio.sleep(0.02)
        return int(body["n"])

    async def ask() -> list[int]:
        async def one(n: int) -> int:
            await asyncio.sleep(n * 0.005)
            return (await pool.request("/run", {"model": "m", "n": n})).value

        endpoint = Endpoint("local:judge", models=("m",), concurrency=1000)
        async with ComputePool([endpoint], transports={"local:judge": FunctionTransport(judge)}) as pool:
            return list(await asyncio.gather(*map(one, range(200))))

    assert uvloop.run(ask()) == list(range(200))
