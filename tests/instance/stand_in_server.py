"""A server that speaks vLLM's routes and behaves as the test says; also a command of its own, for supervision.

Output token n under weight version v is a pure function of (first prompt id, n, v), so that a sequence begun again
must go on exactly where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

VOCAB = 50
CHUNK = 2


def token(first: int, place: int, version: str) -> int:
    return (first + 3 * place + 7 * int(version)) % VOCAB


class StandIn:
    """`behave(body)` says how a request goes: "" is well."""

    def __init__(self, model: Path | str = "stand-in", *, max_context_tokens: int = 512) -> None:
        self.model = str(model)
        self.max_context_tokens = max_context_tokens
        self.logprobs_mode = "raw_logprobs"
        self.device = "stand-in"
        self.chunked_prefill = True
        self.tensor_parallel = 1
        self.behave: Callable[[dict[str, Any]], str] = lambda body: ""
        self.load_fails: Callable[[str], bool] = lambda folder: False
        self.keeps_cache: Callable[[str], bool] = lambda folder: False
        self.deaf_to = ""
        """A weight version that it is told and does not take note of."""
        self.version = "default"
        self.serves = "0"
        self.folders: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.cache_usage = 0.0
        """As a long prefill fills it."""
        self.running = 0
        self.most_running = 0
        self.disconnects = 0
        self.calls: Counter[str] = Counter()
        self.gate = asyncio.Event()
        self.gate.set()
        """Closed, streams wait after their first chunk."""
        self._aborted: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        application = web.Application()
        application.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/server_info", self._info),
                web.get("/weight_info", self._weight_info),
                web.get("/metrics", self._metrics),
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort),
                web.post("/pause", self._well),
                web.post("/resume", self._well),
                web.post("/reset_prefix_cache", self._drop_cache),
                web.post("/collective_rpc", self._rpc),
                web.post("/update_weight_version", self._set_version),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def __aenter__(self) -> StandIn:
        self.url = await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.0"})

    async def _info(self, request: web.Request) -> web.Response:
        model = {"model": self.model, "max_model_len": self.max_context_tokens, "logprobs_mode": self.logprobs_mode}
        config = {
            "model_config": model,
            "scheduler_config": {"max_num_seqs": 64, "enable_chunked_prefill": self.chunked_prefill},
            "device_config": {"device": self.device},
            "parallel_config": {"tensor_parallel_size": self.tensor_parallel},
        }
        return web.json_response({"vllm_config": config})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.calls[request.path] += 1
        return web.Response(text=f'vllm:kv_cache_usage_perc{{engine="0"}} {self.cache_usage}\n')

    async def _well(self, request: web.Request) -> web.Response:
        self.calls[request.path] += 1
        return web.json_response({"success": True})

    async def _drop_cache(self, request: web.Request) -> web.Response:
        self.calls[request.path] += 1
        return web.json_response({"success": not self.keeps_cache(self.folders[-1])})

    async def _rpc(self, request: web.Request) -> web.Response:
        folder = (await request.json())["kwargs"]["weights_path"]
        self.folders.append(folder)
        if self.load_fails(folder):
            return web.json_response({"error": "no such weights"}, status=500)
        assert (Path(folder) / "model.safetensors").is_file()
        self.serves = folder.rpartition("-")[2]
        return web.json_response({"results": [None]})

    async def _set_version(self, request: web.Request) -> web.Response:
        told = (await request.json())["new_version"]
        self.version = self.version if told == self.deaf_to else told
        return web.json_response({"success": True})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _abort(self, request: web.Request) -> web.Response:
        for request_id in (await request.json())["request_ids"]:
            if (aborted := self._aborted.get(request_id)) is not None:
                aborted.set()
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        how = self.behave(body)
        if how == "refuse":
            return web.json_response({"error": "I would rather not"}, status=400)
        if how == "die":
            os._exit(3)
        answer = web.StreamResponse()
        await answer.prepare(request)
        aborted = self._aborted["generate-tokens-" + body["request_id"]] = asyncio.Event()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._stream(request, answer, body, how, aborted)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects += 1
            raise
        finally:
            self.running -= 1
        return answer

    async def _stream(
        self, request: web.Request, answer: web.StreamResponse, body: dict[str, Any], how: str, aborted: asyncio.Event
    ) -> None:
        sampling, serves = body["sampling_params"], self.serves
        # The prompts of these tests have three ids.
        first, begin = body["token_ids"][0], len(body["token_ids"]) - 3
        end, place, reason = begin + sampling["max_tokens"], begin, None
        while reason is None:
            if place > begin:
                await _either(self.gate, aborted)
            if aborted.is_set() or (how == "abort" and place > begin):
                await answer.write(_event([], "abort", self.version))
                return
            if how == "hang":
                await asyncio.Event().wait()
            ids = [token(first, n, serves) for n in range(place, min(place + CHUNK, end))]
            stop = next((n for n, drawn in enumerate(ids) if drawn in sampling["stop_token_ids"]), None)
            if stop is not None:
                ids, reason = ids[: stop + 1], "stop"
            place += len(ids)
            if reason is None and place >= end:
                reason = "length"
            data = _event(_spoilt(ids, how), reason, "999" if how == "other version" else self.version, how)
            if how == "cut" and place > begin + CHUNK:
                await answer.write(data[: len(data) // 2])
                if request.transport is not None:
                    request.transport.abort()
                return
            await answer.write(data)
            await asyncio.sleep(0)
        await answer.write(b"data: [DONE]\n\n")


def _spoilt(ids: list[int], how: str) -> list[int]:
    return [VOCAB, *ids[1:]] if how == "outside" else ids


def _event(ids: list[int], reason: str | None, version: str, how: str = "") -> bytes:
    content = [{"token_id": drawn, "logprob": -9999.0 if how == "nan" else -drawn / 64} for drawn in ids]
    if how == "too few":
        content = content[1:]
    choice = {"index": 0, "token_ids": ids, "finish_reason": reason, "logprobs": {"content": content}}
    if reason is not None:
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(ids)}]
    event = {"error": {"message": "the engine is dead"}} if how == "error" else {"choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _serve(args: argparse.Namespace) -> None:
    server = StandIn(args.model)
    if args.slow:
        server.gate.clear()
    await server.start(args.host, args.port)
    print(f"stand-in {os.getpid()} serves {args.model}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--refuse-to-start", action="store_true")
    arguments = parser.parse_args()
    if arguments.refuse_to_start:
        sys.exit("out of every kind of memory")
    asyncio.run(_serve(arguments))
