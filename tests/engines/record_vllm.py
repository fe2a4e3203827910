"""Records what a real vLLM server says: tests/instance/recorded/vllm.jsonl, which `make test` plays again.

    PENSTOCK_ENGINES=FOLDER python tests/engines/record_vllm.py

FOLDER holds the environment that install-vllm.sh makes, as `vllm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "instance")]

from builtin_models import tiny_model  # noqa: E402
from engine_kinds import managed_server  # noqa: E402
from exchanges import RECORDED, Recorder, Serving  # noqa: E402
from vllm_scenes import LIMITS, MODEL, SCENES  # noqa: E402

from penstock.errors import EngineError  # noqa: E402
from penstock.instance.vllm import FIGURES, VllmDialect  # noqa: E402


async def main() -> None:
    dialect = VllmDialect()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / name for name in ("first", "second")]
        for seed, folder in enumerate(folders):
            tiny_model("llama", seed, tie_word_embeddings=False, **MODEL).save_pretrained(folder)
        server = managed_server("vllm", Path(scratch))
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
            try:
                await server.start(http, folders[0], dialect.limits(*LIMITS))
                recorder = Recorder(server.base_url)
                recorder.names = {str(folder): f"/weights/{folder.name}" for folder in folders}
                recorder.names[scratch] = "/weights"
                recorder.kept = kept
                async with Serving(recorder.handle) as url:
                    for scene in SCENES.values():
                        with contextlib.suppress(EngineError):
                            await scene(dialect, http, url, folders)
                recorder.write(RECORDED / "vllm.jsonl")
            finally:
                await server.close()
    print(f"{len(recorder.exchanges)} exchanges")


def kept(path: str, answer: Any) -> Any:
    """Of long answers what the dialect reads."""
    if path == "/metrics":
        return "".join(f"{line}\n" for line in answer.splitlines() if line.startswith(FIGURES))
    if not path.startswith("/server_info"):
        return answer
    config = answer["vllm_config"]
    model = {name: config["model_config"][name] for name in ("model", "max_model_len", "logprobs_mode")}
    scheduler = {name: config["scheduler_config"][name] for name in ("max_num_seqs", "enable_chunked_prefill")}
    return {
        "vllm_config": {
            "model_config": model,
            "scheduler_config": scheduler,
            "device_config": config["device_config"],
            "parallel_config": {"tensor_parallel_size": config["parallel_config"]["tensor_parallel_size"]},
        }
    }


if __name__ == "__main__":
    asyncio.run(main())
