"""The SGLang dialect: `sglang serve` with its own generate route and its control routes.

Known from SGLang 0.5.23. The server must report log-probabilities of the model itself (SGLANG_RETURN_ORIGINAL_LOGPROB
in its environment; as it comes, it divides the logits by the temperature first), which is looked at before work is
given to it. Streams are read whether the server sends what is new or, by default, everything so far. Weights come by
`update_weights_from_disk` from a folder, with everything ended and the radix cache flushed.

Sampling: each sequence's seed goes along. A server that runs with --enable-deterministic-inference draws token n of a
sequence by (seed, place) alone, so that it goes on elsewhere with the same words; others ignore the seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from penstock.errors import EngineError
from penstock.instance.accelerator import has_accelerator
from penstock.instance.dialect import Chunk, ServerFacts
from penstock.instance.engine import SequenceStart
from penstock.instance.http_calls import call, events, excerpt, field_of, parsed
from penstock.instance.model_folder import config_in, dtype_in, quantization_in
from penstock.sample import Finish

LOAD_S = 600.0
"""For the weights of one version to be read."""
IDLE_S = 60.0
"""For the scheduler to have put away what was ended."""
UP_S = 10.0
"""A server that generates answers its health check after a second, or later where it is busy."""
ABORT_S = 2.0
CONTEXT_MARGIN = 6
"""SGLang takes no input as long as its context length less this (0.5.23, managers/tp_worker.py)."""
CPU_KV_TOKENS = 65_536
"""KV cache of a server on CPU without limits: it would take seven tenths of the machine's memory."""
PROBE_TEMPERATURE = 0.01
PROBE_TOLERANCE = 1e-3
FIGURES_S = 10.0
FIGURES = ("total_prefill_uncached_tokens", "num_used_tokens", "num_running_reqs", "num_waiting_reqs")
"""Of /v1/loads, which is written anew with every chunk of a prefill."""
FINISHES: Mapping[str, Finish] = {"stop": Finish.STOP, "length": Finish.LENGTH}


class _Reason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Span(msgspec.Struct):
    version: str


class _Meta(msgspec.Struct):
    finish_reason: _Reason | None = None
    completion_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_version: str = ""
    weight_versions: list[_Span] | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_events = msgspec.json.Decoder(_Event)


class SglangDialect:
    """Speaks to `sglang serve`. `program` starts it; `cpu` where it is to run without an accelerator."""

    kind = "sglang"
    unties_embeddings = False

    def __init__(self, program: str = "sglang", cpu: bool | None = None) -> None:
        self.frame_steps = 8
        self._program = program
        self._cpu = not has_accelerator() if cpu is None else cpu

    def command(self, model_folder: Path, host: str, port: int, options: Mapping[str, str]) -> list[str]:
        own = {
            "model-type": "llm",
            "model-path": str(model_folder),
            "host": host,
            "port": str(port),
            "dtype": dtype_in(model_folder),
            "skip-tokenizer-init": "",
            "skip-server-warmup": "",
            "incremental-streaming-output": "",
            "log-level": "warning",
        }
        if self._cpu:
            own |= {"device": "cpu", "disable-overlap-schedule": "", "max-total-tokens": str(CPU_KV_TOKENS)}
            # Else its scheduler asks for work without a pause, on a core that the machine's others compute on.
            own["sleep-on-idle"] = ""
        words = [f"--{name}={value}" if value else f"--{name}" for name, value in {**own, **options}.items()]
        return [self._program, "serve", *words]

    def limits(self, max_running: int, max_context_tokens: int) -> dict[str, str]:
        limits = {}
        if max_running:
            limits["max-running-requests"] = str(max_running)
        if max_context_tokens:
            limits["context-length"] = str(max_context_tokens + CONTEXT_MARGIN)
        if max_running and max_context_tokens and self._cpu:
            limits["max-total-tokens"] = str(max_running * (max_context_tokens + CONTEXT_MARGIN))
        return limits

    def environment(self) -> dict[str, str]:
        return {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
            # The margin may lead beyond the model's own context; sequences that long are never asked for.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
            **({"SGLANG_USE_CPU_ENGINE": "1"} if self._cpu else {}),
        }

    async def is_up(self, http: aiohttp.ClientSession, base_url: str) -> bool:
        # Not /health, which may answer for a web server whose scheduler is stuck.
        timeout = aiohttp.ClientTimeout(total=UP_S)
        try:
            async with http.get(f"{base_url}/health_generate", timeout=timeout) as answer:
                return answer.status == 200
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def facts(self, http: aiohttp.ClientSession, base_url: str) -> ServerFacts:
        server = await call(http, "GET", f"{base_url}/server_info")
        model = await call(http, "GET", f"{base_url}/model_info")
        try:
            state = server["internal_states"][0]
            own = config_in(Path(model["model_path"]))
            facts = ServerFacts(
                software=f"sglang {server['version']}",
                model=str(model["model_path"]),
                vocab_size=int(own.get("vocab_size", 0)),
                max_context_tokens=int(server["max_req_input_len"]),
                max_running=int(state["effective_max_running_requests_per_dp"] * server["dp_size"]),
                device=str(server["device"]),
                model_type=str(model["model_type"] or ""),
                quantization=quantization_in(own),
                tensor_parallel=int(server.get("tp_size", 0)),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{base_url} is no SGLang server of a version that is known here: {error!r}") from error
        await self._check_logprobs(http, base_url)
        return facts

    async def _check_logprobs(self, http: aiohttp.ClientSession, base_url: str) -> None:
        """Raises EngineError where the server gives log-probabilities under the distribution that it draws from."""
        plain = await self._top_logprob(http, base_url, 1.0)
        sharp = await self._top_logprob(http, base_url, PROBE_TEMPERATURE)
        if abs(plain - sharp) > PROBE_TOLERANCE:
            raise EngineError(
                f"the server divides its log-probabilities by the temperature (one is {plain:g} at 1 and {sharp:g} at "
                f"{PROBE_TEMPERATURE:g}); those of the model itself are needed: start it with "
                "SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment"
            )

    async def _top_logprob(self, http: aiohttp.ClientSession, base_url: str, temperature: float) -> float:
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 1,
        }
        said = await call(http, "POST", f"{base_url}/generate", body)
        try:
            return float(said["meta_info"]["output_top_logprobs"][0][0][0])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"{base_url}/generate gave no log-probability of one token: {str(said)[:300]}") from error

    async def figures(self, http: aiohttp.ClientSession, base_url: str) -> tuple[float, ...]:
        # Not /metrics, which a server has only where it is told so.
        said = await call(http, "GET", f"{base_url}/v1/loads?include=core", deadline_s=FIGURES_S)
        try:
            return tuple(float(load.get(name, 0)) for load in said["loads"] for name in FIGURES)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{base_url}/v1/loads does not tell the server's load: {str(said)[:300]}") from error

    async def generate(
        self, http: aiohttp.ClientSession, base_url: str, request_id: str, sequence: SequenceStart
    ) -> AsyncIterator[Chunk]:
        sampling, output, cut = sequence.sampling, list(sequence.prefix_ids), False
        while not cut:
            cut = True
            request = self._request(request_id, sequence, output)
            async with contextlib.aclosing(self._stream(http, base_url, request_id, request)) as chunks:
                async for chunk in chunks:
                    output += chunk.token_ids
                    if chunk.finish is Finish.STOP and output[-1] not in sampling.stop_ids:
                        # An end of the model's own files, which SGLang heeds beside ours; the run did not ask for it.
                        full = len(output) >= sampling.max_new_tokens
                        chunk.finish, cut = (Finish.LENGTH, True) if full else (Finish.RUNNING, False)
                    yield chunk
                    if chunk.finish is not Finish.RUNNING or chunk.aborted:
                        return
        yield Chunk(aborted=True, cause="the server's answer ended before the sequence did")

    async def _stream(
        self, http: aiohttp.ClientSession, base_url: str, request_id: str, request: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        """One request's chunks. Left before its end, the server is told; by itself it would find out seconds later."""
        url, reader, over = f"{base_url}/generate", StreamReader(), False
        try:
            async with http.post(url, json=request) as answer:
                if answer.status == 400:
                    over = True
                    said = excerpt(await answer.read())
                    yield Chunk(finish=Finish.FAILED, cause=f"the server refused the request: {said}")
                    return
                if answer.status != 200:
                    over = True
                    raise EngineError(f"POST {url} was refused (HTTP {answer.status}): {excerpt(await answer.read())}")
                async for data in events(answer):
                    chunk = reader.read(data)
                    over = chunk.finish is not Finish.RUNNING or chunk.aborted
                    yield chunk
                    if over:
                        return
        except (OSError, aiohttp.ClientError):
            over = True
            raise
        finally:
            if not over:
                with contextlib.suppress(EngineError, OSError, aiohttp.ClientError, TimeoutError, RuntimeError):
                    async with http.post(
                        f"{base_url}/abort_request",
                        json={"rid": _rid(request_id)},
                        timeout=aiohttp.ClientTimeout(total=ABORT_S),
                    ):
                        pass

    def _request(self, request_id: str, sequence: SequenceStart, output: Sequence[int]) -> dict[str, Any]:
        sampling = sequence.sampling
        return {
            "rid": _rid(request_id),
            "input_ids": [*sequence.prompt_ids, *output],
            "stream": True,
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens - len(output),
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                # Signed, as SGLang takes it.
                "sampling_seed": (sequence.seed + 2**63) % 2**64 - 2**63,
                "stop_token_ids": list(sampling.stop_ids),
                # SGLang heeds no stop id at all where it is told to ignore the model's own.
                "ignore_eos": not sampling.stop_ids,
                "stream_interval": self.frame_steps,
            },
        }

    async def abort(self, http: aiohttp.ClientSession, base_url: str, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            await call(http, "POST", f"{base_url}/abort_request", {"rid": _rid(request_id)})

    async def weight_version(self, http: aiohttp.ClientSession, base_url: str) -> str:
        return field_of(await call(http, "GET", f"{base_url}/model_info", deadline_s=FIGURES_S), "weight_version")

    async def load(self, http: aiohttp.ClientSession, base_url: str, folder: Path, version: int) -> None:
        # Not /pause_generation: an agent that dies before it says /continue_generation would leave a server that hangs.
        await call(http, "POST", f"{base_url}/abort_request", {"abort_all": True})
        await self._wait_idle(http, base_url)
        said = await call(
            http,
            "POST",
            f"{base_url}/update_weights_from_disk",
            {"model_path": str(folder), "weight_version": str(version), "flush_cache": True},
            deadline_s=LOAD_S,
        )
        if not isinstance(said, dict) or said.get("success") is not True:
            raise EngineError(f"the server did not take weight version {version}: {said}")
        now = await self.weight_version(http, base_url)
        if now != str(version):
            raise EngineError(f"the server was given weight version {version} and says {now!r}")

    async def _wait_idle(self, http: aiohttp.ClientSession, base_url: str) -> None:
        """Flushes the radix cache once the scheduler has nothing left, without which an update takes the weights only.

        Raises EngineError where it is not idle in time.
        """
        url = f"{base_url}/flush_cache?timeout={IDLE_S:g}"
        try:
            async with http.post(url, timeout=aiohttp.ClientTimeout(total=2 * IDLE_S)) as answer:
                said = await answer.read()
        except TimeoutError:
            raise EngineError(f"POST {url} was not answered within {2 * IDLE_S:g} s") from None
        if answer.status != 200:
            raise EngineError(f"the server did not flush its cache (HTTP {answer.status}): {excerpt(said)}")


class StreamReader:
    """One stream's events as chunks, whether each holds what is new or everything so far."""

    def __init__(self) -> None:
        self._seen = 0
        """Output tokens of this stream that were taken."""

    def read(self, data: bytes) -> Chunk:
        """Raises EngineError for an error that the server tells and for what makes no sense."""
        try:
            event = _events.decode(data)
        except msgspec.DecodeError as error:
            raise EngineError(f"the server streamed what is no event ({error}): {excerpt(data)}") from error
        if event.error is not None:
            return _refusal(data)
        meta = event.meta_info
        if meta is None:
            raise EngineError(f"the server streamed an event without meta_info: {excerpt(data)}")
        reason = meta.finish_reason
        if reason is not None and reason.type == "abort":
            return self._aborted(event, meta, reason)
        if reason is not None and reason.type not in FINISHES:
            raise EngineError(f"the server ended a sequence as {reason.type!r}, which is not known here")
        chunk = self._tokens(event, meta)
        if chunk is None:
            raise EngineError(
                f"the server sent {len(meta.output_token_logprobs)} log-probabilities and {len(event.output_ids)} "
                f"tokens that are not the next of {meta.completion_tokens}, {self._seen} having come"
            )
        chunk.finish = FINISHES[reason.type] if reason is not None else Finish.RUNNING
        self._seen = meta.completion_tokens
        return chunk

    def _tokens(self, event: _Event, meta: _Meta) -> Chunk | None:
        """The new tokens of an event; None where its numbers don't fit together."""
        new = meta.completion_tokens - self._seen
        ids, entries = event.output_ids, meta.output_token_logprobs
        if new < 0 or len(ids) not in (new, meta.completion_tokens):
            return None
        if len(entries) not in (new, meta.completion_tokens):
            return None
        ids, entries = ids[len(ids) - new :], entries[len(entries) - new :]
        if [token for _, token, _ in entries] != ids:
            return None
        return Chunk(
            token_ids=ids,
            logprobs=[float("nan") if value is None else value for value, _, _ in entries],
            weight_version=meta.weight_versions[-1].version if meta.weight_versions else meta.weight_version,
        )

    def _aborted(self, event: _Event, meta: _Meta, reason: _Reason) -> Chunk:
        """An end that nobody asked for, or at our word.

        What SGLang sends with the end of a request that waits is its last token once more, or a made-up one: tokens
        that don't fit are left out, and drawn again.
        """
        cause = reason.message or "the server ended the request"
        if reason.status_code == 400:
            return Chunk(finish=Finish.FAILED, cause=f"the server refused the request: {cause}")
        chunk = self._tokens(event, meta) or Chunk()
        chunk.aborted, chunk.cause = True, cause
        return chunk


def _refusal(data: bytes) -> Chunk:
    """What the server says instead of tokens: that this request is wrong, or that it can't go on."""
    error = parsed(data, "the server's stream")["error"]
    if isinstance(error, dict) and error.get("code") == 400:
        return Chunk(finish=Finish.FAILED, cause=f"the server refused the request: {error.get('message')}")
    raise EngineError(f"the server broke a sequence off: {excerpt(data)}")


def _rid(request_id: str) -> str:
    """SGLang ends every request whose id begins with the one it was told; with an end mark none begins with another."""
    return f"{request_id};"
