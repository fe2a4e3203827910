"""The SGLang dialect against what a real server said (tests/engines/record_sglang.py), over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from math import isnan
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from exchanges import RECORDED, Player, Serving
from sglang_scenes import AS_IT_COMES, GREEDY, PROMPT, SCENES, STOP_PLACE, stream, tokens_of

from penstock.errors import EngineError
from penstock.instance.dialect import Chunk, ServerFacts
from penstock.instance.engine import SequenceStart
from penstock.instance.sglang import CONTEXT_MARGIN, SglangDialect, StreamReader
from penstock.sample import Finish
from penstock.wire import Sampling

FOLDERS = [Path("/weights/first"), Path("/weights/second")]
WITHIN_S = 30.0


async def played(scene: str, recording: str = "sglang.jsonl", **said: Any) -> Any:
    """What a scene gives over a recording; every request of it must be in there. `said`: also in /server_info."""
    player = Player(RECORDED / recording, scene)
    for exchange in player.exchanges:
        if exchange.path == "/server_info":
            exchange.parts = [json.dumps(json.loads("".join(exchange.parts)) | said)]
    async with Serving(player.handle) as url, aiohttp.ClientSession() as http, asyncio.timeout(WITHIN_S):
        try:
            return await SCENES[scene](SglangDialect(cpu=True), http, url, FOLDERS)
        finally:
            assert not player.missing


async def test_a_server_says_what_it_is() -> None:
    facts = await played("facts")
    assert isinstance(facts, ServerFacts)
    assert (facts.software, facts.device, facts.model_type) == ("sglang 0.5.23", "cpu", "qwen2")
    assert (facts.max_running, facts.max_context_tokens) == (8, 64)
    assert facts.vocab_size == 0, "the model's folder is on another machine"
    assert facts.tensor_parallel == 0, "the recording does not say"
    assert (await played("facts", tp_size=2)).tensor_parallel == 2
    assert await played("up") is True


async def test_an_answer_comes_in_chunks_of_the_frame() -> None:
    chunks = await played("greedy")
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4, 4, 3]
    assert [chunk.finish for chunk in chunks] == [Finish.RUNNING] * 3 + [Finish.LENGTH]
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert all(value <= 0 for chunk in chunks for value in chunk.logprobs)


async def test_a_server_counts_what_it_does() -> None:
    prefilled, _, running, waiting = await played("figures")
    assert (prefilled > len(PROMPT), running, waiting) == (True, 0, 0)


async def test_a_stream_of_everything_so_far_gives_the_same_as_one_of_what_is_new() -> None:
    new = await played("greedy")
    whole = await played("greedy", "sglang-as-it-comes.jsonl")
    assert len(whole) > 1
    assert tokens_of(whole) == tokens_of(new)
    logprobs = [[value for chunk in chunks for value in chunk.logprobs] for chunks in (new, whole)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-5)


async def test_an_answer_goes_on_from_its_prefix_and_max_new_tokens_counts_it() -> None:
    assert len(await played("moved")) == GREEDY.max_new_tokens


async def test_a_sampled_answer_is_as_long_as_asked_and_has_a_logprob_for_every_token() -> None:
    chunks = await played("sampled")
    assert [len(chunk.token_ids) for chunk in chunks] == [len(chunk.logprobs) for chunk in chunks]
    assert len(tokens_of(chunks)) == 20


async def test_a_stop_id_ends_an_answer_and_is_its_last_token() -> None:
    whole, chunks = await played("stopped")
    stop = whole[STOP_PLACE]
    assert tokens_of(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish is Finish.STOP


async def test_a_prompt_that_is_too_long_is_the_samples_fault_and_not_the_servers() -> None:
    (chunk,) = await played("too_long")
    assert chunk.finish is Finish.FAILED
    assert "longer than the model's context length" in chunk.cause


@pytest.mark.parametrize("recording", ["sglang.jsonl", "sglang-as-it-comes.jsonl"])
async def test_an_aborted_answer_keeps_its_tokens_and_may_go_on(recording: str) -> None:
    chunks = await played("ended", recording)
    assert 0 < len(tokens_of(chunks)) < 50
    assert [chunk.aborted for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish is Finish.RUNNING


async def test_a_swap_changes_answers_and_their_version_and_the_old_cache_is_not_read() -> None:
    first, second = await played("swapped")
    assert {chunk.weight_version for chunk in first} == {"1"}
    assert {chunk.weight_version for chunk in second} == {"2"}
    assert tokens_of(first) != tokens_of(second) == tokens_of(await played("greedy"))


async def test_weights_that_are_not_there_are_refused_with_the_servers_words() -> None:
    with pytest.raises(EngineError, match="Failed to get weights iterator"):
        await played("not_swapped")


async def test_a_server_whose_logprobs_are_not_the_models_is_refused() -> None:
    assert "facts" in AS_IT_COMES
    with pytest.raises(EngineError, match="start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1"):
        await played("facts", "sglang-as-it-comes.jsonl")


# What no sound server says, and what a recording can't hold.


def event(ids: Sequence[int], so_far: int, finish: Any = None, **meta: Any) -> bytes:
    entries = [[-0.5, token, None] for token in ids]
    info = {"finish_reason": finish, "completion_tokens": so_far, "output_token_logprobs": entries, **meta}
    return json.dumps({"output_ids": list(ids), "meta_info": info}).encode()


@asynccontextmanager
async def saying(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Any]:
    async with Serving(answer) as url, aiohttp.ClientSession() as http, asyncio.timeout(WITHIN_S):
        yield http, url


async def streaming(request: web.Request, *events: bytes, cut: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for data in events:
        await response.write(b"data: " + data + b"\n\n")
    if cut and request.transport is not None:
        request.transport.abort()
    else:
        await response.write_eof()
    return response


async def heard(*events: bytes, cut: bool = False, sampling: Sampling = GREEDY) -> list[Chunk]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await streaming(request, *events, cut=cut)

    async with saying(answer) as (http, url):
        return await stream(SglangDialect(cpu=True), http, url, "1", sampling)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([event([7], 1), event([8], 3)], "not the next of 3, 1 having come"),
        ([event([7], 1, output_token_logprobs=[])], "0 log-probabilities and 1 tokens"),
        ([event([7], 1, output_token_logprobs=[[-0.5, 8, None]])], "not the next of 1"),
        ([event([7, 8], 2), event([7], 1)], "not the next of 1, 2 having come"),
        ([event([7], 1, {"type": "bored"})], "ended a sequence as 'bored'"),
        ([b'{"text": "hello"}'], "without meta_info"),
        ([b"<html>502</html>"], "no event"),
        ([b'{"error": {"message": "the scheduler is gone", "code": 503}}'], "the scheduler is gone"),
    ],
)
async def test_a_stream_that_makes_no_sense_is_refused_with_what_was_said(events: list[bytes], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        await heard(*events)


async def test_a_logprob_that_the_server_gives_as_none_is_not_a_number() -> None:
    chunks = await heard(event([7], 1, {"type": "length"}, output_token_logprobs=[[None, 7, None]]))
    assert isnan(chunks[0].logprobs[0])


async def test_a_stream_that_is_cut_is_a_broken_connection_and_one_that_ends_early_may_go_on() -> None:
    with pytest.raises(aiohttp.ClientError):
        await heard(event([7], 1), cut=True)
    chunks = await heard(event([7], 1))
    assert (tokens_of(chunks), chunks[-1].aborted) == ([7], True)


async def test_the_last_token_that_comes_twice_with_an_abort_is_taken_once() -> None:
    for extra in (event([8], 2, {"type": "abort", "message": "Aborted"}), event([3], 9, {"type": "abort"})):
        chunks = await heard(event([7, 8], 2), extra)
        assert tokens_of(chunks) == [7, 8]
        assert chunks[-1].aborted
    chunks = await heard(event([28], 1, {"type": "abort", "message": "Input length exceeds", "status_code": 400}))
    assert [(chunk.finish, chunk.token_ids) for chunk in chunks] == [(Finish.FAILED, [])]


async def test_an_end_that_the_run_did_not_ask_for_does_not_end_an_answer() -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["input_ids"])
        if len(asked) == 1:
            return await streaming(request, event([7, 50], 2, {"type": "stop", "matched": 50}))
        return await streaming(request, event([9, 60], 2, {"type": "stop", "matched": 60}))

    async with saying(answer) as (http, url):
        sampling = Sampling(max_new_tokens=12, stop_ids=(60,))
        chunks = await stream(SglangDialect(cpu=True), http, url, "1", sampling)
        assert tokens_of(chunks) == [7, 50, 9, 60]
        assert [chunk.finish for chunk in chunks] == [Finish.RUNNING, Finish.STOP]
        assert asked == [PROMPT, [*PROMPT, 7, 50]]
        asked.clear()
        full = Sampling(max_new_tokens=2, stop_ids=(60,))
        assert (await stream(SglangDialect(cpu=True), http, url, "2", full))[-1].finish is Finish.LENGTH


@pytest.mark.parametrize(("status", "ends"), [(400, "failed"), (500, "error")])
async def test_a_refused_request_fails_its_sequence_and_a_failing_server_is_given_up(status: int, ends: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text='{"error": {"message": "not like this"}}')

    async with saying(answer) as (http, url):
        if ends == "failed":
            (chunk,) = await stream(SglangDialect(cpu=True), http, url, "1")
            assert chunk.finish is Finish.FAILED
            assert "not like this" in chunk.cause
        else:
            with pytest.raises(EngineError, match=r"HTTP 500.*not like this"):
                await stream(SglangDialect(cpu=True), http, url, "1")


async def test_a_stream_left_before_its_end_is_aborted_in_the_server() -> None:
    aborted: list[str] = []
    told = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/abort_request":
            aborted.append((await request.json())["rid"])
            told.set()
            return web.Response()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + event([7], 1) + b"\n\n")
        await told.wait()
        return response

    async with saying(answer) as (http, url):
        start = SequenceStart(lease=1, seed=1, prompt_ids=PROMPT, prefix_ids=[], sampling=GREEDY)
        chunks = SglangDialect(cpu=True).generate(http, url, "12", start)
        assert (await anext(chunks)).token_ids == [7]
        await chunks.aclose()  # type: ignore[attr-defined]
        assert aborted == ["12;"]
        assert not "12;".startswith("1;"), "SGLang ends every request whose id begins with the one it is told"


async def test_a_swap_that_the_server_does_not_confirm_is_an_error() -> None:
    calls: list[str] = []
    update: dict[str, Any] = {"success": True}

    async def answer(request: web.Request) -> web.StreamResponse:
        calls.append(request.path)
        if request.path in ("/flush_cache", "/abort_request"):
            return web.Response(status=flush if request.path == "/flush_cache" else 200)
        return web.json_response(update if "update" in request.path else {"weight_version": "6"})

    flush = 200
    async with saying(answer) as (http, url):
        for expected in (r"weight version 7 and says .*'6'", "did not take weight version 7"):
            with pytest.raises(EngineError, match=expected):
                await SglangDialect(cpu=True).load(http, url, FOLDERS[0], 7)
            assert (
                calls.index("/abort_request") < calls.index("/flush_cache") < calls.index("/update_weights_from_disk")
            )
            calls.clear()
            update["success"] = False
        flush = 400
        with pytest.raises(EngineError, match="did not flush its cache"):
            await SglangDialect(cpu=True).load(http, url, FOLDERS[0], 7)
        assert "/update_weights_from_disk" not in calls, "the weights would be taken and the old cache kept"


def test_numbers_are_counted_whatever_a_chunk_holds() -> None:
    reader = StreamReader()
    assert reader.read(event([1, 2], 2)).token_ids == [1, 2]
    assert reader.read(event([1, 2, 3], 3)).token_ids == [3]
    assert reader.read(event([4, 5], 5)).token_ids == [4, 5]
    assert reader.read(event([], 5, {"type": "length"})).finish is Finish.LENGTH


def test_the_command_line_follows_the_machine_the_run_and_the_options(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    on_cpu, on_gpu = SglangDialect(cpu=True), SglangDialect(program="other", cpu=False)
    words = on_cpu.command(tmp_path, "127.0.0.1", 8000, {"max-total-tokens": "99", "enable-metrics": ""})
    assert words[:2] == ["sglang", "serve"]
    assert {f"--model-path={tmp_path}", "--dtype=bfloat16", "--device=cpu", "--port=8000"} <= set(words)
    assert [word for word in words if "max-total" in word] == ["--max-total-tokens=99"]
    assert {"--enable-metrics", "--sleep-on-idle"} <= set(words)
    words = on_gpu.command(tmp_path, "127.0.0.1", 8000, {})
    assert words[0] == "other"
    assert not any(word.startswith(("--device", "--max-total", "--sleep-on-idle")) for word in words)
    assert "SGLANG_USE_CPU_ENGINE" in on_cpu.environment()
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu.environment()
    context = str(100 + CONTEXT_MARGIN)
    assert on_gpu.limits(8, 100) == {"max-running-requests": "8", "context-length": context}
    assert on_cpu.limits(8, 100)["max-total-tokens"] == str(8 * int(context))
    assert on_gpu.limits(0, 0) == {}


async def test_the_seed_the_frame_and_the_stop_ids_are_asked_for() -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await streaming(request, event([7], 1, {"type": "length"}))

    async with saying(answer) as (http, url):
        dialect = SglangDialect(cpu=True)
        await stream(dialect, http, url, "1", prefix=[4, 5], frame_steps=3)
        await stream(dialect, http, url, "2", Sampling(max_new_tokens=9, stop_ids=(7,), top_k=3))
    first, second = (request["sampling_params"] for request in asked)
    assert asked[0]["input_ids"] == [*PROMPT, 4, 5]
    assert (first["max_new_tokens"], first["stream_interval"]) == (GREEDY.max_new_tokens - 2, 3)
    assert first["sampling_seed"] == second["sampling_seed"] == -7, "of 64 bits, signed, wherever the sequence goes on"
    assert (first["ignore_eos"], first["stop_token_ids"], first["top_k"]) == (True, [], -1)
    assert (second["ignore_eos"], second["stop_token_ids"], second["top_k"]) == (False, [7], 3)
