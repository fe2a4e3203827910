"""How long an SGLang server stands still for new weights: from a folder in memory, and by a gloo group with its agent.

    PYTHONPATH=tests/instance:tests/engines PENSTOCK_ENGINES=FOLDER python benchmarks/weight_ways.py

FOLDER holds the environment that tests/engines/install-sglang.sh makes, as `sglang`. Both ways in turns on one server,
for a model of 0.9 M and one of 104 M parameters in float32. The group is what Penstock does without: it is made here by
PyTorch's own, unpublished parts, as SGLang makes its end of it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
from builtin_models import staged, tiny_model
from engine_kinds import managed_server

from penstock.errors import EngineError
from penstock.instance.http_calls import call
from penstock.instance.sglang import SglangDialect
from penstock.instance.supervise import free_port
from penstock.instance.weight_folder import WeightFolders

ROUNDS = 6
WITHIN = timedelta(seconds=60)
CONTEXT = 512
SHAPES = {
    "0.9 M": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4},
    "104 M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8},
}


async def main() -> None:
    figures = {}
    for name, shape in SHAPES.items():
        shape |= {"num_key_value_heads": shape["num_attention_heads"], "vocab_size": 512, "tie_word_embeddings": False}
        model = tiny_model("llama", architectures=["LlamaForCausalLM"], max_position_embeddings=CONTEXT, **shape)
        figures[name] = await in_turns(model)
        print(name, {way: round(median(took), 3) for way, took in figures[name].items()}, flush=True)
    print(json.dumps({"bench": "weight_ways", "unit": "s", "results": figures}))


async def in_turns(model: Any) -> dict[str, list[float]]:
    """Seconds of each round: of writing the folder while everything runs, and of each way while nothing does."""
    group_name = f"ways-{free_port()}"  # PyTorch gives a name once in a process.
    took: dict[str, list[float]] = {"writing the folder": [], "folder": [], "group": []}
    dialect, folders = SglangDialect(), WeightFolders()
    with tempfile.TemporaryDirectory() as scratch:
        server = managed_server("sglang", Path(scratch))
        async with aiohttp.ClientSession() as http:
            try:
                await server.start(http, folders.write(staged(model, 0)), dialect.limits(8, CONTEXT))
                group = await make_group(http, server.base_url, group_name)
                for version in range(1, 2 * ROUNDS, 2):
                    began = time.monotonic()
                    folder = await asyncio.to_thread(folders.write, staged(model, version))
                    took["writing the folder"].append(time.monotonic() - began)
                    began = time.monotonic()
                    await dialect.load(http, server.base_url, folder, version)
                    took["folder"].append(time.monotonic() - began)
                    folders.remove(folder)
                    began = time.monotonic()
                    await by_group(http, server.base_url, group, group_name, model.state_dict(), version + 1)
                    took["group"].append(time.monotonic() - began)
            finally:
                await server.close()
                folders.close()
    return took


async def make_group(http: aiohttp.ClientSession, url: str, name: str) -> Any:
    port = free_port()
    end = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    asked = call(http, "POST", f"{url}/init_weights_update_group", {**end, "group_name": name})
    group, _ = await asyncio.gather(asyncio.to_thread(own_end, port, name), asked)
    return group


def own_end(port: int, name: str) -> Any:
    from torch.distributed import distributed_c10d as c10d

    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=WITHIN))
    store.set_timeout(WITHIN)
    store = c10d.PrefixStore(name, store)
    backend = c10d.Backend("gloo")
    group, _ = c10d._new_process_group_helper(2, 0, [], backend, store, group_name=name, timeout=WITHIN)
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


async def by_group(
    http: aiohttp.ClientSession, url: str, group: Any, name: str, tensors: Mapping[str, torch.Tensor], version: int
) -> None:
    """What `SglangDialect.load` does, with the weights broadcast in the place of the folder."""

    def send() -> None:
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor.data, src=0, group=group)

    update = {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": name,
        "weight_version": str(version),
    }
    await call(http, "POST", f"{url}/abort_request", {"abort_all": True})
    async with http.post(f"{url}/flush_cache?timeout=60") as answer:
        answer.raise_for_status()
    await call(http, "POST", f"{url}/begin_weight_update", {})
    asked = call(http, "POST", f"{url}/update_weights_from_distributed", update, deadline_s=WITHIN.total_seconds())
    said, _ = await asyncio.gather(asked, asyncio.to_thread(send))
    await call(http, "POST", f"{url}/end_weight_update", {})
    if said.get("success") is not True:
        raise EngineError(f"the server did not take weight version {version}: {said}")


if __name__ == "__main__":
    asyncio.run(main())
