"""The built-in engine's thread: deltas come while it runs, it sleeps when idle, and its death is told."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
import torch
from builtin_models import Collected, core_for, run_to_end, staged, start, tiny_model

import penstock.instance.builtin
from penstock.errors import EngineError, MissingExtra
from penstock.instance.builtin import engine as engine_module
from penstock.instance.builtin.engine import BuiltinEngine, resolve_device
from penstock.instance.engine import Engine
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights
from penstock.wire import Sampling

MODEL = tiny_model("qwen2", initializer_range=0.1)
LONG = tiny_model("qwen2", max_position_embeddings=4096)
DEADLINE_S = 30.0


@pytest.fixture
async def engine() -> AsyncIterator[BuiltinEngine]:
    made = BuiltinEngine(device="cpu", max_context_tokens=96, threads=1, frame_steps=4)
    try:
        yield made
    finally:
        await made.close()


async def read_until(engine: BuiltinEngine, collected: Collected, done: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        async for delta in engine.deltas():
            collected.add(delta)
            if done():
                return


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_finished(collected: Collected, count: int) -> Callable[[], bool]:
    return lambda: sum(finish is not Finish.RUNNING for finish in collected.finishes.values()) == count


async def test_it_is_an_engine_and_says_what_the_core_says(engine: BuiltinEngine) -> None:
    assert isinstance(engine, Engine)
    assert engine.version == -1
    assert engine.info.vocab_size == 0
    await engine.update_weights(staged(MODEL, 5))
    assert engine.version == 5
    assert engine.info.vocab_size == 101
    jobs = [start(lease, [1, 2, lease], Sampling(max_new_tokens=20)) for lease in range(7)]
    collected = Collected()
    engine.start(jobs)
    await read_until(engine, collected, all_finished(collected, 7))
    assert collected.tokens == run_to_end(core_for(MODEL), jobs).tokens
    load = engine.load()
    assert (load.running, load.waiting, load.kv_tokens) == (0, 0, 0)
    assert load.tokens_generated == 140
    assert load.tokens_prefilled == 21


async def test_deltas_gather_frame_steps_and_the_last_comes_at_once(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL))
    engine.start([start(0, [1, 2], Sampling(max_new_tokens=11))])
    counts = []
    async with asyncio.timeout(DEADLINE_S):
        async for delta in engine.deltas():
            counts.append(delta.counts[0])
            if delta.finishes[0] is not Finish.RUNNING:
                break
    # The step that admits draws a token from the prefill and one from the decode.
    assert counts == [5, 4, 2]


async def test_an_idle_engine_does_not_step(engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.update_weights(staged(MODEL))
    woken = 0
    may_step = engine._may_step

    def counted() -> bool:
        nonlocal woken
        woken += 1
        return may_step()

    monkeypatch.setattr(engine, "_may_step", counted)
    await asyncio.sleep(0.3)
    assert woken <= 2
    assert engine.load().tokens_per_s == 0


async def test_flush_shows_every_token_drawn_and_draws_no_more(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL))
    engine.start([start(lease, [1], Sampling(max_new_tokens=90)) for lease in range(4)])
    collected = Collected()
    await read_until(engine, collected, lambda: True)
    await engine.flush()
    drawn = engine.load().tokens_generated
    await engine.close()
    await read_until(engine, collected, lambda: False)
    assert sum(len(tokens) for tokens in collected.tokens.values()) == drawn == engine.load().tokens_generated


async def test_handing_over_shows_every_token_drawn_ends_everything_and_can_be_followed_by_more(
    engine: BuiltinEngine,
) -> None:
    await engine.update_weights(staged(MODEL))
    engine.start([start(lease, [1], Sampling(max_new_tokens=90)) for lease in range(4)])
    collected = Collected()
    await read_until(engine, collected, lambda: True)
    await engine.hand_over()
    drawn, load = engine.load().tokens_generated, engine.load()
    assert (load.running, load.waiting) == (0, 0)
    engine.start([start(9, [1], Sampling(max_new_tokens=8))])
    await read_until(engine, collected, lambda: len(collected.tokens.get(9, [])) == 8)
    assert sum(len(tokens) for lease, tokens in collected.tokens.items() if lease != 9) == drawn


async def test_a_call_given_up_before_its_turn_is_not_done_and_harms_nobody(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL))
    with engine._wake:  # the thread can't take up its commands
        given_up = asyncio.create_task(engine.update_weights(staged(MODEL, version=1)))
        flush = asyncio.create_task(engine.flush())
        async with asyncio.timeout(DEADLINE_S):
            while len(engine._commands) < 2:
                await asyncio.sleep(0.001)  # a test of what is inside
        given_up.cancel()
        flush.cancel()
        await asyncio.gather(given_up, flush, return_exceptions=True)
    engine.start([start(1, [1, 2], Sampling(max_new_tokens=8))])
    collected = Collected()
    await read_until(engine, collected, all_finished(collected, 1))
    assert engine.version == 0
    assert len(collected.tokens[1]) == 8


async def test_stopped_leases_are_in_no_later_delta(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL))
    engine.start([start(lease, [lease], Sampling(max_new_tokens=60)) for lease in range(6)])
    collected = Collected()
    await read_until(engine, collected, lambda: True)
    before = {lease: len(tokens) for lease, tokens in collected.tokens.items() if lease < 3}
    engine.stop([0, 1, 2, 77])
    await read_until(engine, collected, all_finished(collected, 3))
    assert [len(collected.tokens[lease]) for lease in (3, 4, 5)] == [60, 60, 60]
    assert before == {lease: len(tokens) for lease, tokens in collected.tokens.items() if lease < 3}


async def test_new_weights_serve_sequences_that_were_running(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL, 1))
    engine.frame_steps = 1
    engine.start([start(0, [1, 2], Sampling(max_new_tokens=90))])
    collected = Collected()
    await read_until(engine, collected, lambda: True)
    await engine.update_weights(staged(tiny_model("qwen2", seed=1), 2))
    await read_until(engine, collected, all_finished(collected, 1))
    versions = collected.versions[0]
    assert len(versions) == 90
    assert versions == sorted(versions)
    assert set(versions) == {1, 2} or versions[0] == 1


@pytest.mark.parametrize("reads", [True, False])
async def test_new_weights_wait_for_a_reader_that_is_at_it_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """They serve once a sequence is prefilled with them, though between two deltas one is unread for a moment."""
    monkeypatch.setattr(engine_module, "_READ_S", 10.0 if reads else 0.05)
    engine = BuiltinEngine(device="cpu", max_context_tokens=4096, threads=1, frame_steps=1)
    core, forced = engine._core, 0
    now = core.swap_now

    def swap_now() -> None:
        nonlocal forced
        forced += core.swapping
        now()

    swaps = 0

    async def read() -> None:
        async for _ in engine.deltas():
            if swaps and not reads:
                return
            await asyncio.sleep(0.005)

    try:
        await engine.update_weights(staged(LONG))
        monkeypatch.setattr(core, "swap_now", swap_now)
        engine.start([start(lease, [1, 2, lease], Sampling(max_new_tokens=4000)) for lease in range(4)])
        reading = asyncio.create_task(read())
        async with asyncio.timeout(DEADLINE_S):
            for swaps in (1, 2, 3):
                while reads and engine.load().running < 4:
                    await asyncio.sleep(0.01)
                await engine.update_weights(staged(LONG, swaps))
        assert engine.version == 3
        assert (forced > 0) is not reads
        reading.cancel()
    finally:
        await engine.close()


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(engine: BuiltinEngine) -> None:
    await engine.update_weights(staged(MODEL, 1))
    whole = staged(MODEL, 2)
    cut = {name: data for name, data in whole.tensors.items() if name != "model.norm.weight"}
    with pytest.raises(EngineError, match=r"version 2 does not fit: .*model\.norm\.weight"):
        await engine.update_weights(StagedWeights(whole.manifest, cut))
    assert engine.version == 1
    engine.start([start(0, [1], Sampling(max_new_tokens=3))])
    collected = Collected()
    await read_until(engine, collected, all_finished(collected, 1))


async def test_a_cache_that_cannot_hold_one_sequence_is_an_error_of_the_update() -> None:
    engine = BuiltinEngine(device="cpu", max_context_tokens=4096, kv_cache_mib=1, threads=1)
    try:
        with pytest.raises(EngineError, match="kv_cache_mib is 1"):
            await engine.update_weights(staged(tiny_model("llama", max_position_embeddings=4096)))
        assert engine.version == -1
    finally:
        await engine.close()


async def test_running_fewer_sequences_than_asked_for_is_said(caplog: pytest.LogCaptureFixture) -> None:
    engine = BuiltinEngine(device="cpu", max_context_tokens=1024, kv_cache_mib=2, threads=1)
    try:
        await engine.update_weights(staged(tiny_model("llama", max_position_embeddings=4096)))
        assert engine.info.max_running == 3
        assert engine.kv_cache_bytes <= 2 * 2**20
        assert "3 sequences run at once and not 64: kv_cache_mib=2" in caplog.text
    finally:
        await engine.close()


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    with pytest.raises(MissingExtra, match=r"penstock\[engine\]"):
        importlib.reload(penstock.instance.builtin)


async def test_the_thread_s_death_is_raised_where_deltas_are_read(
    engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(staged(MODEL))

    def die() -> None:
        raise MemoryError("out of device memory")

    monkeypatch.setattr(engine._core, "step", die)
    engine.start([start(0, [1], Sampling(max_new_tokens=3))])
    with pytest.raises(EngineError, match="out of device memory"):
        await read_until(engine, Collected(), lambda: False)
    with pytest.raises(EngineError, match="out of device memory"):
        engine.start([start(1, [1], Sampling(max_new_tokens=3))])
    with pytest.raises(EngineError, match="out of device memory"):
        await engine.flush()


async def test_an_unread_engine_stops_decoding_at_its_bound(
    engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_UNREAD_DELTAS", 3)
    engine.frame_steps = 1
    await engine.update_weights(staged(MODEL))
    engine.start([start(0, [1], Sampling(max_new_tokens=90))])
    await asyncio.to_thread(wait_until, lambda: engine._unread == 3 and engine.load().tokens_generated == 4)
    await asyncio.sleep(0.2)
    assert engine._unread == 3
    assert engine.load().tokens_generated == 4
    collected = Collected()
    await read_until(engine, collected, all_finished(collected, 1))
    assert len(collected.tokens[0]) == 90


async def test_a_slow_reader_holds_the_engine_to_the_frame_that_is_on_its_way(engine: BuiltinEngine) -> None:
    """What a machine that is killed has drawn in vain: never more than a frame of each sequence."""
    await engine.update_weights(staged(MODEL))
    engine.start([start(0, [1, 2], Sampling(max_new_tokens=90))])
    received, ahead = 0, []
    async with asyncio.timeout(DEADLINE_S):
        async for delta in engine.deltas():
            await asyncio.sleep(0.05)  # The manager's socket is slow to take it.
            ahead.append(engine.load().tokens_generated - received)
            received += delta.counts[0]
            if delta.finishes[0] is not Finish.RUNNING:
                break
    assert received == 90
    # The first has the token of the prefill as well.
    assert ahead[0] <= engine.frame_steps + 1
    assert max(ahead[1:]) <= engine.frame_steps, ahead


async def test_close_ends_the_thread_and_the_deltas_and_further_calls_are_refused() -> None:
    engine = BuiltinEngine(device="cpu", max_context_tokens=96, threads=1)
    await engine.update_weights(staged(MODEL))
    engine.start([start(0, [1], Sampling(max_new_tokens=90))])
    await engine.close()
    assert not any(thread is engine._thread for thread in threading.enumerate())
    await read_until(engine, Collected(), lambda: False)
    with pytest.raises(EngineError, match="is closed"):
        engine.start([start(1, [1], Sampling(max_new_tokens=2))])
    with pytest.raises(EngineError, match="is closed"):
        await engine.flush()
    await engine.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "warp"}, "device 'warp'"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": "cuda:99"}, "'cuda:99' is not there"),
        ({"dtype": "float8"}, "dtype 'float8'"),
        ({"max_running": 0}, "max_running is 0"),
        ({"frame_steps": 0}, "frame_steps is 0"),
        ({"threads": 0}, "threads is 0"),
    ],
)
async def test_options_that_cannot_be_met_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        BuiltinEngine(**({"device": "cpu"} | options))  # type: ignore[arg-type]


def test_auto_is_a_device_that_is_there() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("given", "wanted", "served"), [(0, 40, 40), (0, 4096, 96), (64, 40, 64)])
async def test_the_context_that_the_run_wants_is_taken_where_none_was_given(
    given: int, wanted: int, served: int
) -> None:
    engine = BuiltinEngine(device="cpu", max_context_tokens=given, kv_cache_mib=1, threads=1)
    try:
        engine.fit_context(wanted)
        await engine.update_weights(staged(MODEL))
        assert engine.info.max_context_tokens == served
        engine.fit_context(20)
        await engine.update_weights(staged(MODEL, 1))
        assert engine.info.max_context_tokens == served
    finally:
        await engine.close()


async def test_each_layer_of_a_long_prefill_shows_in_the_load_before_any_token_does(
    engine: BuiltinEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(staged(MODEL))
    attend = torch.nn.functional.scaled_dot_product_attention
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def slowly(*arguments: torch.Tensor, **options: object) -> torch.Tensor:
        entered.release()
        assert go_on.acquire(timeout=DEADLINE_S)
        return attend(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.instance.builtin.model.F.scaled_dot_product_attention", slowly)
    engine.start([start(1, [1, 2, 3], Sampling(max_new_tokens=1))])
    loads = []
    for _ in range(MODEL.config.num_hidden_layers):
        assert await asyncio.to_thread(entered.acquire, timeout=DEADLINE_S)
        loads.append(engine.load())
        go_on.release()
    collected = Collected()
    await read_until(engine, collected, all_finished(collected, 1))
    assert {(load.tokens_generated, load.tokens_prefilled) for load in loads} == {(0, 0)}
    counts = [load.work_done for load in loads] + [engine.load().work_done]
    assert counts == sorted(set(counts)), "it grows from layer to layer"
