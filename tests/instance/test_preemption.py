"""Preemption notices against local stand-ins of the clouds' metadata services, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_manager import TOKEN, FakeManager, start_frame
from metadata_stand_in import AZURE_NAME, StandIn, azure_event

from penstock.errors import ConfigError
from penstock.instance.preemption import Preemption, PreemptionConfig, watch
from penstock.weights import WeightStore
from penstock.wire import Goodbye, LoadWeights, Sampling, TokenFrame, VersionReady

CLOUDS = ("aws", "gcp", "azure")
WORDS = {
    "aws": "preemption notice from AWS: spot instance-action terminate, at 2026-11-21T08:22:00Z",
    "gcp": "preemption notice from GCP: the machine is preempted, at 30 s from then",
    "azure": "preemption notice from Azure: scheduled event Preempt, at Sat, 21 Nov 2026 08:22:00 GMT",
}


@contextlib.asynccontextmanager
async def watching(url: str, source: str, **options: object) -> AsyncIterator[tuple[asyncio.Future[str], Preemption]]:
    """The future is the notice's cause; a watch that ends without a notice cancels it."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    preemption = Preemption(PreemptionConfig(source=source, base_url=url, poll_s=0.01, **options))  # type: ignore[arg-type]
    task = asyncio.create_task(preemption.watch(told.set_result))
    task.add_done_callback(lambda _: told.cancel() if not told.done() else None)
    try:
        yield told, preemption
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def cause_of(told: asyncio.Future[str]) -> str:
    return await asyncio.wait_for(told, 20)


@pytest.mark.parametrize("chosen", ["auto", "named"])
@pytest.mark.parametrize("cloud", CLOUDS)
async def test_a_notice_is_told_with_its_source_and_deadline(cloud: str, chosen: str) -> None:
    async with StandIn(cloud) as service:
        async with watching(service.url, "auto" if chosen == "auto" else cloud) as (told, _):
            await service.until_asked(8 if cloud != "gcp" else 4)
            assert not told.done()
            await service.notice()
            assert await cause_of(told) == WORDS[cloud]


@pytest.mark.parametrize("trouble", ["hangs", "404", "500", "garbage"])
async def test_where_there_is_no_cloud_auto_gives_up_quietly(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PROBE_S", 0.3)
    async with StandIn("aws") as service:
        service.trouble = trouble
        async with watching(service.url, "auto") as (told, _):
            with contextlib.suppress(asyncio.CancelledError):
                await cause_of(told)
            assert told.cancelled()


async def test_where_nothing_listens_auto_gives_up_quietly() -> None:
    async with watching("http://127.0.0.1:9", "auto") as (told, _):
        with contextlib.suppress(asyncio.CancelledError):
            await cause_of(told)
        assert told.cancelled()


async def test_none_asks_nobody() -> None:
    async with StandIn("aws") as service:
        async with watching(service.url, "none") as (told, _):
            with contextlib.suppress(asyncio.CancelledError):
                await cause_of(told)
        assert service.asked == []


@pytest.mark.parametrize("trouble", ["hangs", "404", "500", "garbage"])
@pytest.mark.parametrize("cloud", CLOUDS)
async def test_a_service_in_trouble_is_asked_again_until_it_answers(
    cloud: str, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metadata.ANSWER_S", "gcp.ANSWER_S", "azure.FIRST_ANSWER_S"):
        monkeypatch.setattr(f"penstock.instance.preemption.{name}", 0.2)
    monkeypatch.setattr(watch, "LONGEST_PAUSE_S", 0.05)
    async with StandIn(cloud) as service:
        service.trouble = trouble
        async with watching(service.url, cloud) as (told, _):
            await service.until_asked(3)
            assert not told.done()
            service.trouble = ""
            await service.notice()
            assert await cause_of(told) == WORDS[cloud]
    assert "no answer about preemption from" in caplog.text


async def test_aws_renews_a_token_that_ran_out() -> None:
    async with StandIn("aws") as service:
        async with watching(service.url, "aws") as (told, _):
            await service.until_asked(4)
            service.token = "another-token"
            await service.notice()
            assert await cause_of(told) == WORDS["aws"]
        assert service.asked.count("/latest/api/token") == 2


@pytest.mark.parametrize("heeded", [False, True])
async def test_an_aws_recommendation_to_rebalance_is_a_notice_where_that_is_asked_for(heeded: bool) -> None:
    async with StandIn("aws") as service:
        service.rebalance = True
        async with watching(service.url, "aws", rebalance=heeded) as (told, _):
            await service.until_asked(6 if not heeded else 1)
            if heeded:
                assert await cause_of(told) == (
                    "preemption notice from AWS: rebalance recommendation of 2026-11-21T08:12:00Z"
                )
            assert told.done() is heeded


async def test_gcp_maintenance_that_ends_the_machine_is_a_notice_and_a_live_migration_is_none() -> None:
    async with StandIn("gcp") as service:
        service.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
        async with watching(service.url, "gcp") as (told, _):
            await service.until_asked(3)
            assert not told.done()
        service.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        async with watching(service.url, "gcp") as (told, _):
            assert "TERMINATE_ON_HOST_MAINTENANCE" in await cause_of(told)


async def test_azure_events_of_other_machines_and_of_other_kinds_are_no_notice() -> None:
    async with StandIn("azure") as service:
        service.events = [azure_event("Preempt", ["spot-8"]), azure_event("Freeze", [AZURE_NAME])]
        async with watching(service.url, "azure") as (told, _):
            await service.until_asked(4)
            assert not told.done()
            service.events.append(azure_event("Terminate", ["spot-8", AZURE_NAME]))
            assert "scheduled event Terminate" in await cause_of(told)


@pytest.mark.parametrize("asked", [False, True])
async def test_azure_is_told_that_the_machine_has_left_where_that_is_asked_for(asked: bool) -> None:
    async with StandIn("azure") as service:
        await service.notice()
        async with watching(service.url, "azure", acknowledge=asked) as (told, preemption):
            await cause_of(told)
            assert service.approved == []
            await preemption.left()
        assert service.approved == (["id-of-Preempt"] if asked else [])


async def test_a_service_that_can_not_be_told_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watch, "LEFT_S", 0.1)
    async with StandIn("azure") as service:
        await service.notice()
        async with watching(service.url, "azure", acknowledge=True) as (told, preemption):
            await cause_of(told)
            service.trouble = "hangs"
            await preemption.left()
    assert "could not be told" in caplog.text


# ---- a source of the user's own


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_notices.py").write_text(
        "calls = 0\n"
        "async def notice():\n"
        "    global calls\n"
        "    calls += 1\n"
        "    if calls == 1:\n"
        "        raise KeyError('not yet')\n"
        "    return 'the queue takes this node' if calls > 2 else ''\n"
        "def no_coroutine(): return ''\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_notices"
    sys.modules.pop("own_notices", None)


async def test_a_users_own_source_is_asked_and_its_trouble_is_told(
    own_module: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching("http://127.0.0.1:9", f"{own_module}:notice") as (told, _):
        assert await cause_of(told) == f"preemption notice from {own_module}:notice: the queue takes this node"
    assert "KeyError: 'not yet'" in caplog.text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("asw", "--preemption asw is not known"),
        ("own_notices:missing", "can't be loaded"),
        ("no_such_module:f", "can't be loaded"),
        ("own_notices:no_coroutine", "is no async function"),
    ],
)
def test_a_source_that_can_not_be_is_refused_by_name(own_module: str, source: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Preemption(PreemptionConfig(source=source))


# ---- the whole of `penstock join`


@pytest.mark.parametrize("cloud", CLOUDS)
async def test_a_machine_that_gets_a_notice_sends_what_it_has_and_leaves_in_good_order(cloud: str) -> None:
    store = WeightStore("run", "127.0.0.1", 0, TOKEN)
    store.start()
    store.publish(0, [("w", "F32", (500,), bytes(2000))], '{"vocab_size": 50}')
    try:
        async with FakeManager(frame_steps=1) as manager, StandIn(cloud) as service:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock", "join", "--manager", manager.url, "--engine", "paced"),
                *("--tokens-per-s", "2000", "--preemption-url", service.url, "--preemption-poll-s", "0.05"),
                *(("--preemption-ack",) if cloud == "azure" else ()),
                env={**os.environ, "PENSTOCK_TOKEN": TOKEN},
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                session = await manager.session(within_s=60)
                await session.send(LoadWeights(version=0, source=store.address))
                await session.next_of(VersionReady)
                await session.send(start_frame([1, 2, 3], sampling=Sampling(max_new_tokens=4000)))
                await session.next_of(TokenFrame, count=5)
                await service.notice()
                _, said = await asyncio.wait_for(process.communicate(), 60)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, said.decode()
            goodbye = session.frames[-1]
            assert isinstance(goodbye, Goodbye)
            assert goodbye.cause == WORDS[cloud]
            assert service.approved == (["id-of-Preempt"] if cloud == "azure" else [])
    finally:
        store.close()
