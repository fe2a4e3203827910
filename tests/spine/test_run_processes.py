"""The processes that a run starts by itself, as real processes: what the manager was told is what it tells others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import aiohttp
import psutil
import pytest

from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.train.processes import Child, LocalProcesses
from penstock.wire import AgentHello, Welcome, decode_from_manager, encode
from penstock.wire.codec import PROTOCOL, PROTOCOL_HEADER

TOKEN = "the-run's-token"
LEAST = {"model": {"path": "unused"}, "data": {"train": [{"kind": "jsonl", "path": "unused"}]}}


async def test_the_runs_manager_tells_machines_from_outside_what_the_run_wants_of_them(tmp_path: Path) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": [{"kind": "jsonl", "path": "unused"}]},
            "rollout": {"engines": {"max_context_tokens": 4321, "frame_steps": 3}, "heartbeat_s": 1.5},
            "manager": {"max_frame_mib": 2},
        }
    )
    processes = LocalProcesses(config, tmp_path, TOKEN, lambda event: None)
    try:
        url = processes.start_manager()
        headers = {"Authorization": f"Bearer {TOKEN}", PROTOCOL_HEADER: str(PROTOCOL)}
        async with aiohttp.ClientSession(headers=headers) as http, http.ws_connect(f"{url}/agent") as socket:
            hello = AgentHello(name="spot", engine="x", pid=1, host="h", max_running=1, max_context_tokens=1)
            await socket.send_bytes(encode(hello))
            welcome = decode_from_manager((await socket.receive(timeout=30)).data)
    finally:
        processes.close()
    assert welcome == Welcome(
        instance="spot", heartbeat_s=1.5, frame_steps=3, max_context_tokens=4321, max_frame_bytes=2 * 1024 * 1024
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engines_of_another_kind_are_agents_with_a_server_and_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    options = {"enforce-eager": True, "swap-space": 2, "trust": False}
    engines = {"kind": kind, "command": "serve {model} {port}", "options": options}
    config = RunConfig.model_validate(LEAST | {"rollout": {"engines": engines, "load_deadline_s": 77}})
    processes = LocalProcesses(config, tmp_path, TOKEN, lambda event: None)
    spawned: list[list[str]] = []

    def spawn(name: str, arguments: list[str]) -> Child:
        spawned.append(arguments)
        return Child(name, subprocess.Popen(["true"]), tmp_path / "log", (tmp_path / "log").open("ab"))

    monkeypatch.setattr(processes, "_spawn", spawn)
    try:
        processes.start_engine("http://manager", "a test")
    finally:
        processes.close()
    words = spawned[0]
    assert words[words.index("--engine") + 1] == kind
    assert words[words.index("--engine-command") + 1] == "serve {model} {port}"
    assert words[words.index("--engine-start-s") + 1] == "77.0"
    assert words[-2:] == ["--engine.enforce-eager", "--engine.swap-space=2"]
    assert "--reserved" in words


@pytest.mark.parametrize(
    ("engines", "reason"),
    [
        ({"command": "serve {model} {port}"}, 'are for kind = "vllm" or "sglang"'),
        ({"kind": "vllm", "tokens_per_s": 10}, 'kind is "vllm"'),
    ],
)
def test_engine_options_that_make_no_sense_together_are_refused(engines: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate(LEAST | {"rollout": {"engines": engines}})


def test_a_run_on_engines_whose_program_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    config = RunConfig.model_validate(LEAST | {"rollout": {"engines": {"kind": "vllm"}}})
    with pytest.raises(ConfigError, match="needs the program vllm on PATH"):
        LocalProcesses(config, tmp_path, TOKEN, lambda event: None)


@pytest.mark.parametrize("journal", ["off", "always"])
def test_the_runs_manager_keeps_a_journal_in_the_runs_folder_unless_told_not_to(tmp_path: Path, journal: str) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": [{"kind": "jsonl", "path": "unused"}]},
            "rollout": {"stall_s": 45},
            "manager": {"journal": journal, "journal_max_mib": 7, "trainer_grace_s": 12},
        }
    )
    processes = LocalProcesses(config, tmp_path, TOKEN, lambda event: None)
    try:
        processes.start_manager()
        words = psutil.Process(processes._manager.process.pid).cmdline()  # type: ignore[union-attr]
    finally:
        processes.close()
    assert (tmp_path / "journal").exists() == (journal != "off")
    assert words[words.index("--trainer-grace-s") + 1] == "12.0"
    assert words[words.index("--stall-s") + 1] == "45.0"
    if journal != "off":
        assert words[words.index("--journal-fsync") + 1] == journal
        assert words[words.index("--journal-max-mib") + 1] == "7"
