"""The vLLM dialect: `vllm serve` with its token-in, token-out route and its control routes.

Needs vLLM 0.30 or later, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1 in its environment, and without a
tokenizer (--skip-tokenizer-init): token ids go in and come out. Weights come by `reload_weights` from a folder, with
generation paused and both caches dropped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.errors import EngineError
from penstock.instance.accelerator import has_accelerator
from penstock.instance.dialect import Chunk, ServerFacts
from penstock.instance.engine import SequenceStart
from penstock.instance.http_calls import call, call_text, events, excerpt, field_of, metrics_in, request_seed
from penstock.instance.model_folder import config_of, dtype_in, quantization_in
from penstock.sample import Finish

LOAD_S = 600.0
"""For the weights of one version to be read."""
UP_S = 5.0
FIGURES_S = 10.0
NO_LOGPROB = -9999.0
"""What vLLM sends for a log-probability that is NaN, minus infinity or missing."""
INT8_CODES = "compressed-tensors int-quantized"
ID_PREFIX = "generate-tokens-"
"""What the server puts before the ids that its requests came with."""
FIGURES = ("vllm:kv_cache_usage_perc", "vllm:prompt_tokens_total", "vllm:generation_tokens_total")
"""Of /metrics. The share of the KV cache that is in use grows with every chunk of a prefill."""
FINISHES: Mapping[str | None, Finish] = {None: Finish.RUNNING, "stop": Finish.STOP, "length": Finish.LENGTH}


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_events = msgspec.json.Decoder(_Event)


class VllmDialect:
    """Speaks to `vllm serve`. `program` starts it; `cpu` where it is to run without an accelerator."""

    kind = "vllm"
    # On CPU vLLM 0.32 reloads a tied embedding as input only: its output layer keeps the copy that it packed at first.
    unties_embeddings = True

    def __init__(self, program: str = "vllm", cpu: bool | None = None) -> None:
        self.frame_steps = 8
        self._program = program
        self._cpu = not has_accelerator() if cpu is None else cpu

    def command(self, model_folder: Path, host: str, port: int, options: Mapping[str, str]) -> list[str]:
        own = {
            "host": host,
            "port": str(port),
            "dtype": dtype_in(model_folder),
            "enable-scale-out": "",
            "skip-tokenizer-init": "",
            "generation-config": "vllm",
            "disable-uvicorn-access-log": "",
        }
        if self._cpu and not any(name.endswith("chunked-prefill") for name in options):
            # On CPU a seeded request whose prefill is cut ends the engine: vLLM would set its generator back a step.
            own["no-enable-chunked-prefill"] = ""
        if self._cpu and not any(name.endswith("parallel-size") for name in options):
            # Two processes that hand each step to one another look for it without a pause, on cores that the
            # machine's others compute on; in one process there is nothing to look for.
            own["distributed-executor-backend"] = "uni"
        words = [f"--{name}={value}" if value else f"--{name}" for name, value in {**own, **options}.items()]
        return [self._program, "serve", str(model_folder), *words]

    def limits(self, max_running: int, max_context_tokens: int) -> dict[str, str]:
        named = {"max-num-seqs": max_running, "max-model-len": max_context_tokens}
        return {name: str(value) for name, value in named.items() if value}

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Without it vLLM's CPU build turns "uni" back into two processes.
            **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if self._cpu else {}),
        }

    async def is_up(self, http: aiohttp.ClientSession, base_url: str) -> bool:
        try:
            async with http.get(f"{base_url}/health", timeout=aiohttp.ClientTimeout(total=UP_S)) as answer:
                return answer.status == 200
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def facts(self, http: aiohttp.ClientSession, base_url: str) -> ServerFacts:
        version = await call(http, "GET", f"{base_url}/version")
        try:
            config = (await call(http, "GET", f"{base_url}/server_info?config_format=json"))["vllm_config"]
        except EngineError as error:
            raise EngineError(
                f"the server's control routes don't answer; start it with VLLM_SERVER_DEV_MODE=1 in its environment "
                f"({error})"
            ) from error
        try:
            model, mode = config["model_config"], config["model_config"]["logprobs_mode"]
            chunked = config["scheduler_config"].get("enable_chunked_prefill")
            own = config_of(str(model["model"]))
            facts = ServerFacts(
                software=f"vllm {version['version']}",
                model=str(model["model"]),
                vocab_size=int(own.get("vocab_size", 0)),
                max_context_tokens=int(model["max_model_len"]),
                max_running=int(config["scheduler_config"]["max_num_seqs"]),
                device=str(config["device_config"]["device"]),
                model_type=str(own.get("model_type", "")),
                quantization=quantization_in(own),
                tensor_parallel=int(config.get("parallel_config", {}).get("tensor_parallel_size", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{base_url} is not a vLLM server of a version that is known here: {error!r}") from error
        overrides = model.get("hf_overrides")
        tied = {**own, **(overrides if isinstance(overrides, dict) else {})}.get("tie_word_embeddings")
        if tied and facts.device == "cpu":
            raise EngineError(
                "on CPU vLLM reloads only one side of tied embeddings; start the server with "
                """--hf-overrides='{"tie_word_embeddings": false}' on a folder that holds lm_head.weight"""
            )
        if chunked and facts.device == "cpu":
            raise EngineError(
                "on CPU vLLM dies of a seeded request whose prefill it cuts, as it does where many samples come at "
                "once; start the server with --no-enable-chunked-prefill"
            )
        if facts.quantization == INT8_CODES and facts.device == "cpu":
            raise EngineError(
                "on CPU vLLM serves the first int8 codes that it is given and answers with NaN after the next; give it "
                "the numbers that they stand for (leave out --engine-codes, or rollout.engines.codes), or fp8"
            )
        if mode != "raw_logprobs":
            raise EngineError(
                f"the server runs with --logprobs-mode={mode}; log-probabilities of the model itself are needed: "
                "start it with raw_logprobs"
            )
        return facts

    async def figures(self, http: aiohttp.ClientSession, base_url: str) -> tuple[float, ...]:
        return metrics_in(await call_text(http, f"{base_url}/metrics", deadline_s=FIGURES_S), FIGURES)

    async def generate(
        self, http: aiohttp.ClientSession, base_url: str, request_id: str, sequence: SequenceStart
    ) -> AsyncIterator[Chunk]:
        url = f"{base_url}/inference/v1/generate"
        async with http.post(url, json=self._request(request_id, sequence)) as answer:
            if answer.status == 400:
                cause = f"the server refused the request: {excerpt(await answer.read())}"
                yield Chunk(finish=Finish.FAILED, cause=cause)
                return
            if answer.status != 200:
                raise EngineError(f"POST {url} was refused (HTTP {answer.status}): {excerpt(await answer.read())}")
            async for data in events(answer):
                chunk = read_event(data)
                yield chunk
                if chunk.finish is not Finish.RUNNING or chunk.aborted:
                    return
        yield Chunk(aborted=True, cause="the server's answer ended before the sequence did")

    def _request(self, request_id: str, sequence: SequenceStart) -> dict[str, Any]:
        sampling, prefix = sequence.sampling, list(sequence.prefix_ids)
        return {
            "request_id": request_id,
            "token_ids": [*sequence.prompt_ids, *prefix],
            "stream": True,
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens - len(prefix),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "seed": request_seed(sequence.seed, len(prefix)),
                "stop_token_ids": list(sampling.stop_ids),
                # Only the ids above end a sequence: what else the model's own files call an end is the run's choice.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
                "stream_interval": self.frame_steps,
            },
        }

    async def abort(self, http: aiohttp.ClientSession, base_url: str, request_ids: Sequence[str]) -> None:
        ids = [f"{ID_PREFIX}{request_id}" for request_id in request_ids]
        await call(http, "POST", f"{base_url}/inference/v1/abort_requests", {"request_ids": ids})

    async def weight_version(self, http: aiohttp.ClientSession, base_url: str) -> str:
        return field_of(await call(http, "GET", f"{base_url}/weight_info", deadline_s=FIGURES_S), "weight_version")

    async def load(self, http: aiohttp.ClientSession, base_url: str, folder: Path, version: int) -> None:
        await call(http, "POST", f"{base_url}/pause?mode=abort&clear_cache=true")
        try:
            await call(
                http,
                "POST",
                f"{base_url}/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": LOAD_S},
                deadline_s=LOAD_S,
            )
            dropped = await call(http, "POST", f"{base_url}/reset_prefix_cache")
            if not isinstance(dropped, dict) or dropped.get("success") is not True:
                raise EngineError(f"the server did not drop its prefix cache: {dropped}")
            await call(http, "POST", f"{base_url}/update_weight_version", {"new_version": str(version)})
        finally:
            await call(http, "POST", f"{base_url}/resume")
        said = await self.weight_version(http, base_url)
        if said != str(version):
            raise EngineError(f"the server was given weight version {version} and says {said!r}")


def read_event(data: bytes) -> Chunk:
    """One event of the stream. Raises EngineError for an error that the server tells and for what makes no sense."""
    try:
        event = _events.decode(data)
    except msgspec.DecodeError as error:
        raise EngineError(f"the server streamed what is no event ({error}): {excerpt(data)}") from error
    if event.error is not None or len(event.choices) != 1:
        raise EngineError(f"the server broke a sequence off: {excerpt(data)}")
    choice = event.choices[0]
    content = (choice.logprobs.content if choice.logprobs else None) or []
    ids = choice.token_ids or []
    if [entry.token_id for entry in content] != ids:
        raise EngineError(f"the server sent {len(content)} log-probabilities that are not those of {len(ids)} tokens")
    aborted = choice.finish_reason == "abort"
    if not aborted and choice.finish_reason not in FINISHES:
        raise EngineError(f"the server ended a sequence as {choice.finish_reason!r}, which is not known here")
    return Chunk(
        token_ids=ids,
        logprobs=[_logprob(entry.logprob) for entry in content],
        finish=Finish.RUNNING if aborted else FINISHES[choice.finish_reason],
        aborted=aborted,
        cause="the server ended the request" if aborted else "",
        weight_version=choice.weight_versions[-1].version if choice.weight_versions else "",
    )


def _logprob(value: float | None) -> float:
    return float("nan") if value is None or value <= NO_LOGPROB else value
