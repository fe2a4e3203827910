"""Servers that an agent starts: processes, signals, and a `penstock join` whose server dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from fake_manager import TOKEN, FakeManager, start_frame
from test_agent_processes import penstock

from penstock import cli
from penstock.errors import ConfigError, EngineError
from penstock.instance.supervise import ManagedServer, group_cpu_s
from penstock.instance.vllm import VllmDialect
from penstock.weights import WeightStore
from penstock.wire import Goodbye, LoadWeights, Sampling, TokenFrame, VersionReady

WITHIN_S = 60.0
STAND_IN = Path(__file__).parent / "stand_in_server.py"
COMMAND = f"{sys.executable} {STAND_IN} {{model}} --host {{host}} --port {{port}}"


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def managed(log_path: Path, command: str = COMMAND, **options: str) -> ManagedServer:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return ManagedServer(VllmDialect(), log_path, template=command, options=named, start_s=WITHIN_S)


async def server_pid(log_path: Path) -> int:
    """Of the stand-in that spoke last in this log."""
    async with asyncio.timeout(WITHIN_S):
        while not (pids := _pids(log_path)):
            await asyncio.sleep(0.02)
    return pids[-1]


def _pids(log_path: Path) -> list[int]:
    said = log_path.read_text() if log_path.exists() else ""
    return [int(pid) for pid in re.findall(r"stand-in (\d+) serves", said)]


async def gone(pid: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while _lives(pid):
            await asyncio.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_server_is_started_on_the_weights_and_ended_with_the_engine(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    log_path = tmp_path / "logs" / "server.log"
    server = managed(log_path)
    await server.start(http, tmp_path, {})
    pid = await server_pid(log_path)
    assert f"serves {tmp_path}" in log_path.read_text()
    assert await VllmDialect().is_up(http, server.base_url)
    await server.close()
    await gone(pid)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    with pytest.raises(EngineError, match=r"did not start: log .*server\.log ends: (.|\n)*out of every kind of memory"):
        await managed(tmp_path / "server.log", refuse_to_start="").start(http, tmp_path, {})
    with pytest.raises(EngineError, match="no-such-program can't be started: No such file"):
        await managed(tmp_path / "other.log", "no-such-program {model} {port}").start(http, tmp_path, {})


async def test_a_server_has_the_environment_that_its_control_routes_and_this_machine_need(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "the-run-s")
    monkeypatch.setenv("PENSTOCK_OPERATOR_TOKEN", "an-operator-s")
    echo = "routes=$VLLM_SERVER_DEV_MODE threads=$OMP_NUM_THREADS $PENSTOCK_TOKEN$PENSTOCK_OPERATOR_TOKEN no doors"
    command = f"sh -c 'echo {echo}; exit 1' {{model}} {{port}}"
    server = ManagedServer(
        VllmDialect(), tmp_path / "log", template=command, start_s=WITHIN_S, environment={"OMP_NUM_THREADS": "3"}
    )
    with pytest.raises(EngineError, match="routes=1 threads=3 no doors"):
        await server.start(http, tmp_path, {})


async def test_a_server_whose_port_another_one_took_did_not_start(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"address in use\")' {{model}} {{port}}"
    server = managed(tmp_path / "server.log", command)

    async def another_answers(*_: object) -> bool:
        await server._process.wait()  # type: ignore[union-attr]
        return True

    monkeypatch.setattr(VllmDialect, "is_up", another_answers)
    with pytest.raises(EngineError, match="address in use"):
        await server.start(http, tmp_path, {})


async def test_a_server_that_never_answers_is_ended_at_its_deadline(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    command = f"{sys.executable} -c 'import time; time.sleep(1000)' {{model}} {{port}}"
    server = ManagedServer(VllmDialect(), tmp_path / "server.log", template=command, start_s=0.1)
    with pytest.raises(EngineError, match=r"did not answer within 0\.1 s"):
        await server.start(http, tmp_path, {})


async def test_a_server_that_dies_is_noticed_with_its_last_words(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    server = managed(tmp_path / "server.log")
    await server.start(http, tmp_path, {})
    os.kill(await server_pid(tmp_path / "server.log"), signal.SIGKILL)
    async with asyncio.timeout(WITHIN_S):
        cause = await server.died()
    assert cause.startswith("the vllm server died: ")
    assert "ended: killed by signal 9" in cause


async def test_a_servers_log_is_bounded_and_its_last_words_are_kept(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    words = "yes and so on | head -c 800000; echo the last; exit 1"
    command = f'sh -c "{words}" {{model}} {{port}}'
    log_path = tmp_path / "server.log"
    server = ManagedServer(VllmDialect(), log_path, template=command, start_s=WITHIN_S, log_bytes=100_000)
    with pytest.raises(EngineError, match=r"and so on\nthe last\nsh ended: exit code 1"):
        await server.start(http, tmp_path, {})
    sizes = [entry.stat().st_size for entry in os.scandir(tmp_path)]
    assert len(sizes) == 2
    assert max(sizes) < 100_000 + 65_536  # What is read at once is written at once.


async def test_the_processor_time_of_a_server_is_that_of_all_its_processes() -> None:
    busy = f"{sys.executable} -c 'while True: pass'"
    process = await asyncio.create_subprocess_shell(f"{busy} & {busy}", start_new_session=True)
    try:
        async with asyncio.timeout(WITHIN_S):
            while group_cpu_s(process.pid) < 0.5:
                await asyncio.sleep(0.02)
        assert group_cpu_s(os.getpid() + 10**7) == 0.0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def test_a_server_does_not_outlive_an_agent_that_is_killed(tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    script = f"""
        import asyncio, aiohttp, pathlib
        from penstock.instance.supervise import ManagedServer
        from penstock.instance.vllm import VllmDialect

        async def main():
            async with aiohttp.ClientSession() as http:
                server = ManagedServer(VllmDialect(), pathlib.Path({str(log_path)!r}), template={COMMAND!r})
                await server.start(http, pathlib.Path({str(tmp_path)!r}), {{}})
                await server.died()

        asyncio.run(main())
    """
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(script))
    try:
        pid = await server_pid(log_path)
    finally:
        agent.kill()
        await agent.wait()
    await gone(pid)


def test_the_dialects_own_command_takes_limits_and_the_users_options_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    dialect = VllmDialect()
    server = ManagedServer(dialect, tmp_path / "log", options={"max-num-seqs": "7", "enforce-eager": ""})
    words = server.words(tmp_path, "127.0.0.1", 5000, dialect.limits(64, 256))
    assert words[:3] == ["vllm", "serve", str(tmp_path)]
    for word in ("--dtype=float32", "--port=5000", "--max-model-len=256", "--max-num-seqs=7", "--enforce-eager"):
        assert words.count(word) == 1
    assert "--max-num-seqs=64" not in words


def test_a_command_of_the_users_own_gets_the_folder_the_port_and_the_options(tmp_path: Path) -> None:
    server = managed(tmp_path / "log", "serve '{model}' -p{port}", dtype="half", eager="")
    words = server.words(Path("/a folder"), "127.0.0.1", 5000, {"max-num-seqs": "64"})
    assert words == ["serve", "/a folder", "-p5000", "--dtype=half", "--eager"]


@pytest.mark.parametrize("command", ["vllm serve {model}", "vllm serve --port {port}", "vllm 'serve", ""])
def test_a_command_that_could_start_no_server_is_refused(tmp_path: Path, command: str) -> None:
    if command:
        with pytest.raises(ConfigError, match="the engine command"):
            managed(tmp_path / "log", command)
    else:
        assert cli.main(["join", "--manager", "m", "--engine", "vllm", "--engine-restarts", "-1"]) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--engine-url", "http://a:1"], "--engine-url is for an engine server"),
        (["--engine.dtype=half"], "--engine.NAME is for an engine server"),
        (["--engine", "vllm", "--engine-url", "http://a:1", "--engine.dtype=half"], "--engine-url takes one that runs"),
        (["--engine", "vllm", "--engine-start-s", "0"], "--engine-start-s above 0"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["join", "--manager", "m", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_machine_without_the_engines_program_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    assert cli.main(["join", "--manager", "http://127.0.0.1:9", "--engine", "vllm"]) == 2
    assert "vllm is not on PATH" in capsys.readouterr().err


# ---- the whole command


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN)
    held.start()
    held.publish(0, [("w", "F32", (4, 2), bytes(32))], '{"vocab_size": 50, "model_type": "llama"}')
    yield held
    held.close()


@contextlib.asynccontextmanager
async def joined(manager: FakeManager, log_path: Path, folder: Path, *words: str) -> AsyncIterator[object]:
    arguments = ["--engine", "vllm", "--engine-command", COMMAND, "--engine-log", str(log_path)]
    arguments += ["--engine-folder", str(folder), "--max-context", "64"]
    async with penstock("join", "--manager", manager.url, *arguments, *words) as agent:
        yield agent


async def test_an_agent_whose_server_dies_says_goodbye_and_comes_back_as_new(
    store: WeightStore, tmp_path: Path
) -> None:
    log_path = tmp_path / "server.log"
    async with FakeManager() as manager:
        async with joined(manager, log_path, tmp_path, "--engine-restarts", "1", "--engine.slow") as agent:
            for ordinal in (1, 2):
                session = await manager.session(ordinal, within_s=WITHIN_S)
                await session.send(LoadWeights(version=0, source=store.address))
                ready = await session.wait_for(
                    lambda frames: [frame for frame in frames if isinstance(frame, VersionReady)], within_s=WITHIN_S
                )
                assert ready[0].vocab_size == 50
                await session.send(start_frame([1, 2], sampling=Sampling(max_new_tokens=40)))
                await session.next_of(TokenFrame)
                os.kill(await server_pid(log_path), signal.SIGKILL)
                goodbye = await session.next_of(Goodbye)
                assert "the vllm server" in goodbye.cause
                assert goodbye.cause.startswith("the engine failed: ")
                log_path.unlink()
            code, said = await agent.ended()
    assert code == 1
    assert "the engine is started again in 1 s" in said
    assert "the vllm server died" in said or "is gone" in said


async def test_an_agent_told_to_leave_ends_its_server(store: WeightStore, tmp_path: Path) -> None:
    log_path, folder = tmp_path / "server.log", tmp_path / "weights"
    folder.mkdir()
    async with FakeManager() as manager:
        async with joined(manager, log_path, folder, "--engine.slow", "--engine-start-s", "345") as agent:
            session = await manager.session(within_s=WITHIN_S)
            assert session.frames[0].start_s == 345.0, "what the manager is to wait for it beyond a load"
            await session.send(LoadWeights(version=0, source=store.address))
            await session.next_of(VersionReady)
            command = log_path.read_text().splitlines()[0]
            assert command.endswith(" --slow"), "the engine's own option"
            await session.send(start_frame([1, 2], sampling=Sampling(max_new_tokens=40)))
            await session.next_of(TokenFrame)
            pid = await server_pid(log_path)
            agent.process.send_signal(signal.SIGTERM)
            code, said = await agent.ended()
    assert code == 0, said
    assert session.of(Goodbye)[-1].cause == "got SIGTERM"
    assert list(session.tokens()) == [1, 2]
    assert os.listdir(folder) == []
    await gone(pid)
