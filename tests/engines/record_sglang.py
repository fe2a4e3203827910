"""Records what a real SGLang server says: tests/instance/recorded/sglang*.jsonl, which `make test` plays again.

    PYTHONPATH=tests/instance PENSTOCK_ENGINES=FOLDER python tests/engines/record_sglang.py

FOLDER holds the environment that install-sglang.sh makes, as `sglang`. Two servers are started one after the other:
one as the dialect starts it, one as SGLang comes, with cumulative streams and log-probabilities of the drawing
distribution.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from builtin_models import tiny_model
from exchanges import RECORDED, Recorder, Serving
from sglang_scenes import AS_IT_COMES, LIMITS, MODEL, SCENES

from penstock.errors import EngineError
from penstock.instance.sglang import SglangDialect
from penstock.instance.supervise import ManagedServer

RUNNING = "effective_max_running_requests_per_dp"
BARE = (
    "sglang serve --model-type=llm --model-path={model} --host={host} --port={port} --device=cpu --dtype=float32 "
    "--disable-overlap-schedule --skip-tokenizer-init --skip-server-warmup --max-total-tokens=4096 --log-level=warning"
)


async def main() -> None:
    path = f"{os.environ['PENSTOCK_ENGINES']}/sglang/bin:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("first", "second")]
        for seed, folder in enumerate(folders):
            tiny_model("qwen2", seed, **MODEL).save_pretrained(folder)
        await record("sglang.jsonl", folders, [*SCENES], template="", environment={"PATH": path})
        bare = {"PATH": path, "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
        await record("sglang-as-it-comes.jsonl", folders, AS_IT_COMES, template=BARE, environment=bare)


async def record(
    name: str, folders: list[Path], scenes: list[str], *, template: str, environment: dict[str, str]
) -> None:
    dialect = SglangDialect(cpu=True)
    log = folders[0].parent / "server.log"
    server = ManagedServer(dialect, log, template=template, environment=environment)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
        try:
            await server.start(http, folders[0], dialect.limits(*LIMITS))
            recorder = Recorder(server.base_url)
            recorder.names = {str(folder): f"/weights/{folder.name}" for folder in folders}
            recorder.names[str(folders[0].parent)] = "/weights"
            recorder.kept = kept
            async with Serving(recorder.handle) as url:
                for scene in scenes:
                    recorder.scene = scene
                    with contextlib.suppress(EngineError):
                        await SCENES[scene](dialect, http, url, folders)
            recorder.write(RECORDED / name)
        finally:
            await server.close()
    print(f"{name}: {len(recorder.exchanges)} exchanges")


def kept(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Of long answers what the dialect reads."""
    if path == "/server_info":
        states = [{RUNNING: state[RUNNING]} for state in answer["internal_states"]]
        return {key: answer[key] for key in ("version", "max_req_input_len", "dp_size", "tp_size", "device")} | {
            "internal_states": states
        }
    if path == "/model_info":
        return {key: answer[key] for key in ("model_path", "model_type", "weight_version")}
    return answer


if __name__ == "__main__":
    asyncio.run(main())
