"""Local process pools and sandboxes as endpoints of a compute pool, with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from reward_support import PATIENCE_S, until_gone

from penstock.errors import PoolError, RewardError
from penstock.reward import ComputePool, ProcessTransport, Sandbox, SandboxTransport
from penstock.reward.sandbox import Limits, available_isolation

FUNCTION = """
import os, time

def work(body, *, factor: int = 2):
    match body["do"]:
        case "hang":
            if "here" in body: open(body["here"], "w").close()
            time.sleep(600)
        case "die": os._exit(7)
        case "raise": raise ValueError("no such thing")
        case "strange": return object()
    return {"pid": os.getpid(), "double": body["n"] * factor}
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    file = tmp_path / "prover.py"
    file.write_text(FUNCTION)
    return f"{file}:work"


@pytest.fixture
async def transport(function: str) -> AsyncIterator[ProcessTransport]:
    transport = ProcessTransport(function, processes=2, timeout_s=60)
    yield transport
    await transport.close()


def pool_of(transport: ProcessTransport) -> ComputePool:
    return ComputePool([transport.endpoint("prover")], transports={"local:prover": transport})


async def ask(pool: ComputePool, **body: Any) -> Any:
    return (await pool.request("/", body)).value


async def test_a_process_pool_is_scheduled_by_its_concurrency(transport: ProcessTransport) -> None:
    assert transport.endpoint("prover").concurrency == 2
    async with pool_of(transport) as pool:
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*(ask(pool, do="work", n=n) for n in range(20)))
        assert [answer["double"] for answer in answers] == [2 * n for n in range(20)]
        assert {answer["pid"] for answer in answers} <= set(transport.pids)


async def test_options_reach_the_function(function: str) -> None:
    transport = ProcessTransport(function, processes=1, options={"factor": 5})
    async with pool_of(transport) as pool:
        assert (await ask(pool, do="work", n=3))["double"] == 15


async def test_hung_jobs_never_starve_the_good_ones(function: str) -> None:
    transport = ProcessTransport(function, processes=2, timeout_s=2.5)
    async with pool_of(transport) as pool:
        hung = [asyncio.create_task(ask(pool, do="hang")) for _ in range(6)]
        good = [asyncio.create_task(ask(pool, do="work", n=n)) for n in range(6)]
        async with asyncio.timeout(4 * PATIENCE_S):
            ended = await asyncio.gather(*hung, return_exceptions=True)
            answers = await asyncio.gather(*good)
        assert all(isinstance(error, PoolError) and "was killed" in str(error) for error in ended)
        assert [answer["double"] for answer in answers] == [2 * n for n in range(6)]
        pids = transport.pids
    await until_gone(*pids)


@pytest.mark.parametrize(
    ("do", "cause"), [("raise", "ValueError: no such thing"), ("die", "exit code 7"), ("strange", "TypeError")]
)
async def test_what_goes_wrong_is_final_for_its_job_alone(transport: ProcessTransport, do: str, cause: str) -> None:
    ended = []
    pool = ComputePool([transport.endpoint("prover")], transports={"local:prover": transport}, on_event=ended.append)
    async with pool:
        for _ in range(6):  # more than would take a service out
            with pytest.raises(PoolError, match=cause):
                await ask(pool, do=do)
        assert len(ended) == 6, "each was tried once"
        async with asyncio.timeout(PATIENCE_S):
            assert (await ask(pool, do="work", n=1))["double"] == 2


async def test_a_caller_that_leaves_ends_its_process(function: str, tmp_path: Path) -> None:
    transport = ProcessTransport(function, processes=1, timeout_s=600)
    async with pool_of(transport) as pool:
        first = (await ask(pool, do="work", n=1))["pid"]
        begun = tmp_path / "begun"
        hung = asyncio.create_task(ask(pool, do="hang", here=str(begun)))
        async with asyncio.timeout(PATIENCE_S):
            while not begun.exists():  # nothing tells when another process writes a file
                await asyncio.sleep(0.02)
        hung.cancel()
        await until_gone(first)
        async with asyncio.timeout(PATIENCE_S):
            assert (await ask(pool, do="work", n=1))["pid"] != first


async def test_the_endpoints_own_time_out_holds_as_well(function: str) -> None:
    transport = ProcessTransport(function, processes=1, timeout_s=600)
    endpoint = transport.endpoint("prover", timeout_s=1.0)
    async with ComputePool([endpoint], transports={"local:prover": transport}) as pool:
        with pytest.raises(PoolError, match="no answer within 1 s"):
            await ask(pool, do="hang")


async def test_a_function_that_cannot_be_loaded_is_said_to_every_job() -> None:
    transport = ProcessTransport("./nowhere.py:f", processes=1)
    async with pool_of(transport) as pool:
        for _ in range(2):
            with pytest.raises(PoolError, match=r"there is no file .*nowhere.py"):
                await ask(pool, do="work", n=1)
    for wrong in ({"processes": 0}, {"timeout_s": 0}):
        with pytest.raises(RewardError, match="must be above 0"):
            ProcessTransport("m:f", **wrong)


@pytest.mark.skipif(available_isolation()[0] == "none", reason=str(available_isolation()[1]))
async def test_a_sandbox_kills_what_its_caller_no_longer_waits_for() -> None:
    here = SandboxTransport(Sandbox(Limits(wall_s=600)), concurrency=1)
    async with ComputePool([here.endpoint("sandbox")], transports={"local:sandbox": here}) as pool:
        hung = asyncio.create_task(pool.request("/run_code", {"code": "import time; time.sleep(600)"}))
        while not pool.running:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        hung.cancel()
        async with asyncio.timeout(PATIENCE_S):  # the one slot is free again
            reply = await pool.request("/run_code", {"code": "print(input())", "stdin": "hi", "language": "python"})
        assert reply.value["run_result"]["stdout"] == "hi\n"
        assert reply.value["status"] == "Success"


@pytest.mark.skipif(available_isolation()[0] == "none", reason=str(available_isolation()[1]))
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({}, "'code' and 'stdin' must be text"),
        ({"code": "x", "language": "cpp"}, "'language' is 'cpp'"),
        ({"code": "x", "files": {"a": "b"}}, "'files'"),
        ({"code": "x", "run_timeout": -1}, "limit wall_s"),
    ],
)
async def test_a_request_that_a_sandbox_cannot_serve_is_final(body: dict[str, Any], cause: str) -> None:
    here = SandboxTransport(Sandbox())
    async with ComputePool([here.endpoint("sandbox")], transports={"local:sandbox": here}) as pool:
        with pytest.raises(PoolError, match=cause):
            await pool.request("/run_code", body)
