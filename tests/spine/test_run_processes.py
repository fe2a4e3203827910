"""The processes that a run starts by itself, as real processes: what the manager was told is what it tells others."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from penstock.config.run import RunConfig
from penstock.train.processes import LocalProcesses
from penstock.wire import AgentHello, Welcome, decode_from_manager, encode
from penstock.wire.codec import PROTOCOL, PROTOCOL_HEADER

TOKEN = "the-run's-token"


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
