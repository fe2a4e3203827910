"""The gateway: a pool behind one address, for clients that know nothing of pools."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from penstock.cli import main
from penstock.errors import ConfigError, PortInUse
from penstock.reward.gateway import Gateway
from penstock.reward.limits import Endpoint, PoolConfig, PoolOptions
from penstock.reward.pool import ComputePool
from penstock.simulate.provider_server import ProviderServer
from penstock.simulate.providers import Provider

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "vendor": 1}


async def post(url: str, path: str, body: object, headers: dict | None = None) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session:
        async with session.post(url + path, json=body, headers=headers) as response:
            return response.status, await response.json()


async def test_requests_pass_through_whole_and_many_processes_share_one_limit() -> None:
    async with ProviderServer(Provider(median_s=0.005, round_trip_s=0.0)) as server:
        async with ComputePool([Endpoint(server.url, concurrency=2)]) as pool, Gateway(pool) as gateway:
            replies = await asyncio.gather(*(post(gateway.url, "/chat/completions", CHAT) for _ in range(20)))
            assert all(status == 200 for status, _ in replies)
            assert replies[0][1]["asked"]["vendor"] == 1
            assert server.most_in_flight <= 2
            status, embedded = await post(gateway.url, "/embeddings", {"model": "e", "input": ["a", "b"]})
            assert (status, len(embedded["data"])) == (200, 2)
            for path in ("/classify", "/score", "/rerank"):
                body = {"model": "rm", "input": "x", "text_1": "a", "text_2": "b", "query": "q", "documents": ["d"]}
                assert (await post(gateway.url, path, body))[0] == 200
                assert (await post(gateway.url.removesuffix("/v1"), path, body))[0] == 200


async def test_streams_are_handed_on_as_they_come() -> None:
    async with ProviderServer() as server:
        async with ComputePool([Endpoint(server.url)]) as pool, Gateway(pool) as gateway:
            async with aiohttp.ClientSession() as session:
                async with session.post(gateway.url + "/chat/completions", json={**CHAT, "stream": True}) as response:
                    assert response.headers["content-type"].startswith("text/event-stream")
                    text = (await response.read()).decode()
            assert text.count("data: ") == 6
            assert text.endswith("data: [DONE]\n\n")
            status, said = await post(gateway.url, "/chat/completions", {**CHAT, "model": "fault-400", "stream": True})
            assert (status, said["error"]["type"]) == (400, "JobFailed")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/nowhere", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/pool", 405, "method_not_allowed"),
    ],
)
async def test_a_wrong_path_or_method_is_said_as_the_api_says_errors(
    method: str, path: str, status: int, kind: str
) -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9/v1")]) as pool, Gateway(pool) as gateway:
        async with aiohttp.ClientSession() as session:
            async with session.request(method, gateway.url.removesuffix("/v1") + path) as response:
                said = await response.json()
                assert (response.status, said["error"]["type"]) == (status, kind)
                assert said["error"]["message"]
                assert response.headers.get("Allow") == {"not_found": None}.get(
                    kind, "POST" if path.startswith("/v1") else "GET"
                )


@pytest.mark.parametrize(
    ("model", "headers", "status", "kind"),
    [
        ("nobody", {}, 404, "NoEndpoint"),
        ("fault-400", {}, 400, "JobFailed"),
        ("fault-500", {}, 502, "JobFailed"),
        ("fault-spent", {}, 402, "BudgetSpent"),
        ("fault-silent", {"x-penstock-deadline-s": "0.1"}, 504, "DeadlinePassed"),
        ("fault-429", {"x-penstock-deadline-s": "0.1"}, 504, "DeadlinePassed"),
        ("m", {"x-penstock-priority": "high"}, 400, "bad_request"),
        ("m", {"x-penstock-priority": "nan"}, 400, "bad_request"),
        ("m", {"x-penstock-priority": "-inf"}, 400, "bad_request"),
        ("m", {"x-penstock-deadline-s": "nan"}, 400, "bad_request"),
        ("m", {"x-penstock-deadline-s": "-1"}, 400, "bad_request"),
    ],
)
async def test_each_failure_has_its_status(model: str, headers: dict, status: int, kind: str) -> None:
    async with ProviderServer() as server:
        endpoint = Endpoint(server.url, models=("m", "fault-*"))
        async with ComputePool([endpoint], PoolOptions(attempts=1)) as pool, Gateway(pool) as gateway:
            got, said = await post(gateway.url, "/chat/completions", {**CHAT, "model": model}, headers)
    assert (got, said["error"]["type"]) == (status, kind)


async def test_what_is_no_json_object_is_refused() -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9")]) as pool, Gateway(pool) as gateway:
        assert (await post(gateway.url, "/chat/completions", [1]))[0] == 400


async def test_a_request_without_a_model_is_told_so_where_one_is_needed() -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9", models=("judge",))]) as pool, Gateway(pool) as gateway:
        status, said = await post(gateway.url, "/chat/completions", {"messages": []})
        assert (status, said["error"]["message"]) == (404, "the request names no model; served: judge")


async def test_priority_and_hanging_up_reach_the_pool() -> None:
    async with ProviderServer() as server:
        async with ComputePool([Endpoint(server.url, concurrency=1)]) as pool, Gateway(pool) as gateway:
            silent = {**CHAT, "model": "fault-silent"}
            caller = asyncio.create_task(post(gateway.url, "/chat/completions", silent))
            await server.arrived(1)
            low = asyncio.create_task(post(gateway.url, "/chat/completions", {**CHAT, "model": "low"}))
            while pool.waiting < 1:
                await asyncio.sleep(0.005)
            high = asyncio.create_task(
                post(gateway.url, "/chat/completions", {**CHAT, "model": "high"}, {"x-penstock-priority": "5"})
            )
            while pool.waiting < 2:
                await asyncio.sleep(0.005)
            caller.cancel()
            await asyncio.gather(low, high)
            assert [body["model"] for _, body in server.seen] == ["fault-silent", "high", "low"]


async def test_a_token_is_asked_for_and_needed_off_the_loopback() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        async with Gateway(pool, token="s3cret") as gateway:
            assert (await post(gateway.url, "/chat/completions", CHAT))[0] == 401
            right = {"Authorization": "Bearer s3cret"}
            assert (await post(gateway.url, "/chat/completions", CHAT, right))[0] == 200
        with pytest.raises(ConfigError, match="give it a token"):
            Gateway(pool, host="0.0.0.0")


async def test_operators_see_models_health_rows_and_metrics() -> None:
    async with ProviderServer() as server:
        endpoint = Endpoint(server.url, name="judge", models=("judge-*",))
        async with ComputePool([endpoint]) as pool, Gateway(pool) as gateway:
            await post(gateway.url, "/chat/completions", {**CHAT, "model": "judge-1"})
            root = gateway.url.removesuffix("/v1")
            async with aiohttp.ClientSession() as session:
                async with session.get(gateway.url + "/models") as response:
                    assert (await response.json())["data"][0]["id"] == "judge-*"
                async with session.get(root + "/healthz") as response:
                    assert (await response.json())["ok"] is True
                async with session.get(root + "/pool") as response:
                    assert (await response.json())[0]["done"] == 1
                async with session.get(root + "/metrics") as response:
                    assert 'penstock_pool_done_total{endpoint="judge"} 1' in await response.text()


async def test_a_port_in_use_is_named() -> None:
    async with ComputePool([Endpoint("http://127.0.0.1:9")]) as pool, Gateway(pool) as first:
        with pytest.raises(PortInUse, match=f":{first.port} is in use"):
            await Gateway(pool, port=first.port).start()
        elsewhere = Gateway(pool, host="192.0.2.1", token="t")  # an address of documentation, never this machine's
        with pytest.raises(ConfigError, match=r"can't listen on 192\.0\.2\.1:0: Cannot assign"):
            await elsewhere.start()


def test_the_command_refuses_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", str(tmp_path / "none.toml")]) == 2
    assert "can't be read" in capsys.readouterr().err
    file = tmp_path / "pool.toml"
    file.write_text('[[endpoints]]\nurl = "http://127.0.0.1:9"\napi_key_env = "NOT_SET_ANYWHERE"\n')
    assert main(["gateway", str(file)]) == 2
    assert "NOT_SET_ANYWHERE, which is not set" in capsys.readouterr().err
    assert main(["gateway", str(file), "--token-env", "NOT_SET_EITHER"]) == 2
    assert "NOT_SET_EITHER, which is not set" in capsys.readouterr().err
    file.write_text('[[endpoints]]\nurl = "http://127.0.0.1:9"\n')
    assert main(["gateway", str(file), "--host", "0.0.0.0"]) == 2
    assert "give it a token" in capsys.readouterr().err
    file.write_text('[[endpoints]]\nname = "a"\n')
    assert main(["gateway", str(file)]) == 2
    assert capsys.readouterr().err.endswith("endpoints[0]: 'url' is missing\n")
    for option, value in (("--port", "99999"), ("--table-every", "-1"), ("--table-every", "nan")):
        assert main(["gateway", str(file), option, value]) == 2
        assert f"argument {option}" in capsys.readouterr().err


async def test_a_reload_that_names_a_missing_key_changes_nothing() -> None:
    async with ProviderServer() as server, ComputePool([Endpoint(server.url)]) as pool:
        with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE, which is not set"):
            pool.reload(PoolConfig((Endpoint(server.url, api_key_env="NOT_SET_ANYWHERE"),)))
        assert pool.endpoints == [Endpoint(server.url)]
        assert (await pool.chat(**CHAT))["choices"]


async def test_the_command_serves_reads_its_file_again_and_ends_when_told(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        file = tmp_path / "pool.toml"
        file.write_text(f'[[endpoints]]\nurl = "{server.url}"\nname = "a"\n')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "gateway", str(file), "--port", "0", "--table-every", "0.1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            first = (await process.stdout.readline()).decode()
            url = first.split()[-1]
            assert (await post(url, "/chat/completions", CHAT))[0] == 200
            while b" 1 " not in (line := await process.stdout.readline()):
                assert line
            assert b" ok " in line
            file.write_text("nonsense = [")
            process.send_signal(signal.SIGHUP)
            assert b"the pool goes on as it was" in await process.stderr.readline()
            assert (await post(url, "/chat/completions", CHAT))[0] == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_command_asks_for_its_token_and_ends_with_its_input(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "gateway", "pool.toml", "--port", "0", "--table-every", "0"),
            *("--host", "127.0.0.1", "--token-env", "GATEWAY_TOKEN", "--exit-with-stdin"),
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "GATEWAY_TOKEN": "t0ken"},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = (await process.stdout.readline()).decode().split()[-1]
            assert url.startswith("http://127.0.0.1:")
            assert (await post(url, "/chat/completions", CHAT))[0] == 401
            assert (await post(url, "/chat/completions", CHAT, {"Authorization": "Bearer t0ken"}))[0] == 200
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), 60) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_the_command_sends_equal_requests_once_and_keeps_their_answers(tmp_path: Path) -> None:
    async with ProviderServer(Provider(median_s=0.3, spread=0.0, round_trip_s=0.0)) as server:
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n')
        for options, sent in ((("--single-flight",), [1, 2]), (("--cache", "answers"), [1, 1])):
            before = server.requests
            async with serving(tmp_path, *options) as (_, url):
                await asyncio.gather(*(post(url, "/chat/completions", CHAT) for _ in range(3)))
                counts = [server.requests - before]
                assert (await post(url, "/chat/completions", CHAT))[0] == 200
                assert [*counts, server.requests - before] == sent


async def test_callers_in_flight_are_told_that_the_command_has_ended(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n[pool]\nhedge_share = 0\n')
        async with serving(tmp_path) as (process, url):
            silent = {**CHAT, "model": "fault-silent"}
            callers = [
                asyncio.create_task(post(url, "/chat/completions", {**silent, "stream": stream}))
                for stream in (False, True)
            ]
            await server.arrived(2)
            process.send_signal(signal.SIGINT)
            for status, said in await asyncio.gather(*callers):
                assert (status, said["error"]["type"]) == (503, "PoolClosed")
            assert await asyncio.wait_for(process.wait(), 60) == 0
            assert process.stdout is not None
            assert b"2 requests in work" in await process.stdout.read()


async def test_the_command_serves_on_when_nobody_reads_its_table_any_more(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n')
        reading, writing = os.pipe()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", "gateway", "pool.toml", "--port", "0", "--table-every", "0.05"),
            cwd=tmp_path,
            stdout=writing,
            stderr=subprocess.PIPE,
        )
        os.close(writing)
        try:
            url = (await asyncio.to_thread(os.read, reading, 1000)).decode().split()[-1]
            os.close(reading)
            for _ in range(3):  # each changes the table
                assert (await post(url, "/chat/completions", CHAT))[0] == 200
                await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            _, errors = await asyncio.wait_for(process.communicate(), 60)
            assert (process.returncode, errors) == (0, b"")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def serving(folder: Path, *options: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`penstock gateway pool.toml` in a folder, and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "gateway", "pool.toml", "--port", "0", "--table-every", "0", *options),
        cwd=folder,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
