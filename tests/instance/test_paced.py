"""The paced engine on virtual time: its rate, its tokens, and where it stops."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EngineError
from penstock.instance import Engine, PacedEngine, SequenceStart, TokenDelta
from penstock.instance.liveness import StallWatch
from penstock.instance.paced import paced_tokens
from penstock.sample import Finish
from penstock.weights import Manifest, StagedWeights
from penstock.wire import Sampling


class VirtualTime:
    """A clock that moves only when the engine sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def weights(version: int = 0, config_json: str = '{"vocab_size": 50}') -> StagedWeights:
    manifest = Manifest(
        run="r", version=version, codec="raw", base=None, config_json=config_json, tensors=(), chunks=()
    )
    return StagedWeights(manifest=manifest, tensors={})


def sequence(lease: int, max_new_tokens: int = 32, prefix: Sequence[int] = (), **sampling: object) -> SequenceStart:
    settings = Sampling(max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]
    return SequenceStart(lease=lease, seed=lease, prompt_ids=[1, 2, 3], prefix_ids=list(prefix), sampling=settings)


class Collected:
    """Everything that an engine's deltas said, by lease, checked for gaps."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.begins: dict[int, int] = {}
        self.finishes: dict[int, Finish] = {}
        self.causes: dict[int, str] = {}
        self.deltas: list[TokenDelta] = []

    def add(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self.causes.update(delta.causes)
        position = 0
        for row, lease in enumerate(delta.leases):
            tokens = delta.token_ids[position : position + delta.counts[row]]
            position += delta.counts[row]
            begin = self.begins.setdefault(lease, delta.starts[row])
            held = self.tokens.setdefault(lease, [])
            assert delta.starts[row] == begin + len(held)
            held.extend(tokens)
            if delta.finishes[row]:
                assert lease not in self.finishes
                self.finishes[lease] = delta.finishes[row]
        assert position == len(delta.token_ids) == len(delta.logprobs)
        assert all(logprob <= 0 for logprob in delta.logprobs)


async def collect(engine: PacedEngine, until: Callable[[Collected], bool]) -> Collected:
    collected = Collected()
    async with asyncio.timeout(60):
        async for delta in engine.deltas():
            collected.add(delta)
            if until(collected):
                break
    return collected


def finished(count: int) -> Callable[[Collected], bool]:
    return lambda collected: len(collected.finishes) == count


async def paced(**options: object) -> tuple[PacedEngine, VirtualTime]:
    virtual = VirtualTime()
    sleep: Callable[[float], Awaitable[None]] = virtual.sleep
    settings = {"tokens_per_s": 1000.0, "clock": virtual.clock, "sleep": sleep, **options}
    engine = PacedEngine(**settings)  # type: ignore[arg-type]
    assert isinstance(engine, Engine)
    await engine.update_weights(weights())
    return engine, virtual


@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_a_token_depends_on_seed_and_position_alone(seed: int, start: int, splits: list[int]) -> None:
    sampling = Sampling(max_new_tokens=1000, stop_ids=(2, 7))
    start_of = SequenceStart(lease=1, seed=seed, prompt_ids=[1], prefix_ids=[], sampling=sampling)
    whole, finish = paced_tokens(start_of, start, sum(splits), 50, 0.05)
    pieces: list[int] = []
    for steps in splits:
        tokens, piece_finish = paced_tokens(start_of, start + len(pieces), steps, 50, 0.05)
        pieces += tokens
        if piece_finish:
            break
    assert pieces == whole
    assert (finish is Finish.STOP) == (whole[-1] in (2, 7))
    assert all(0 <= token < 50 for token in whole)
    assert not {2, 7} & set(whole[:-1])


async def test_the_rate_is_shared_by_all_sequences_and_kept() -> None:
    engine, virtual = await paced(tokens_per_s=500.0, max_running=8)
    began = virtual.now
    engine.start([sequence(lease, max_new_tokens=100) for lease in range(1, 21)])
    collected = await collect(engine, finished(20))
    assert sum(map(len, collected.tokens.values())) == 2000
    assert virtual.now - began == pytest.approx(2000 / 500.0, rel=1e-6)
    assert set(collected.finishes.values()) == {Finish.LENGTH}
    await engine.close()


@pytest.mark.parametrize("late_s", [0.001, 0.03])
async def test_late_wake_ups_do_not_lower_the_rate_however_short_rounds_are(late_s: float) -> None:
    virtual = VirtualTime()

    async def late(seconds: float) -> None:
        await virtual.sleep(seconds + late_s)

    engine = PacedEngine(tokens_per_s=1000.0, clock=virtual.clock, sleep=late)
    await engine.update_weights(weights())
    began = virtual.now
    engine.start([sequence(1, max_new_tokens=800)])
    await collect(engine, finished(1))
    assert virtual.now - began == pytest.approx(0.8, abs=0.001 + late_s)
    await engine.close()


async def test_prefill_and_the_least_time_of_a_step_cost_what_they_are_told_to() -> None:
    engine, virtual = await paced(tokens_per_s=1e6, prefill_tokens_per_s=30.0, step_s=0.5, frame_steps=4)
    began = virtual.now
    engine.start([sequence(1, max_new_tokens=8, prefix=[5, 5, 5])])
    await collect(engine, finished(1))
    # 3 prompt and 3 prefix tokens at 30 a second, then 5 steps of half a second.
    assert virtual.now - began == pytest.approx(6 / 30.0 + 5 * 0.5)
    assert engine.load().tokens_prefilled == 6
    await engine.close()


async def test_no_more_than_max_running_run_at_once_and_the_load_says_so() -> None:
    engine, _ = await paced(max_running=3, frame_steps=4)
    engine.start([sequence(lease, max_new_tokens=8) for lease in range(1, 6)])
    collected = await collect(engine, lambda c: len(c.deltas) == 1)
    assert set(collected.tokens) == {1, 2, 3}
    load = engine.load()
    assert (load.running, load.waiting, load.tokens_generated) == (3, 2, 12)
    assert load.kv_tokens == 3 * (3 + 4)
    assert load.tokens_per_s == pytest.approx(1000.0)
    await engine.close()


async def test_an_end_is_told_with_its_step_and_the_next_one_is_let_in_there() -> None:
    engine, virtual = await paced(tokens_per_s=100.0, max_running=2, frame_steps=8)
    began = virtual.now
    engine.start([sequence(1, max_new_tokens=3), sequence(2, max_new_tokens=20), sequence(3, max_new_tokens=5)])
    collected = await collect(engine, finished(3))
    rows = [dict(zip(delta.leases, zip(delta.counts, delta.finishes))) for delta in collected.deltas]
    running, ended = Finish.RUNNING, Finish.LENGTH
    assert rows == [
        {1: (3, ended), 2: (3, running)},
        {2: (5, running), 3: (5, ended)},
        {2: (8, running)},
        {2: (4, ended)},
    ]
    assert virtual.now - began == pytest.approx(28 / 100.0)
    await engine.close()


async def test_a_sample_resumed_elsewhere_says_what_it_would_have_said() -> None:
    first, _ = await paced(mean_tokens=20.0)
    first.start([sequence(lease, 64, stop_ids=(9,)) for lease in range(1, 9)])
    whole = await collect(first, finished(8))
    second, _ = await paced(mean_tokens=20.0, frame_steps=3, max_running=2)
    halves = {lease: tokens[: len(tokens) // 2] for lease, tokens in whole.tokens.items()}
    second.start([sequence(lease, 64, prefix=halves[lease], stop_ids=(9,)) for lease in range(1, 9)])
    resumed = await collect(second, finished(8))
    assert {lease: halves[lease] + resumed.tokens[lease] for lease in halves} == whole.tokens
    assert resumed.finishes == whole.finishes
    assert resumed.begins == {lease: len(half) for lease, half in halves.items()}
    assert Finish.STOP in whole.finishes.values()
    await first.close()
    await second.close()


async def test_a_stopped_sequence_is_never_heard_of_again() -> None:
    engine, _ = await paced(max_running=2, frame_steps=1)
    engine.start([sequence(lease, max_new_tokens=5) for lease in (1, 2, 3)])
    before = await collect(engine, lambda c: len(c.deltas) == 1)
    engine.stop([1, 3, 77])
    after = await collect(engine, finished(1))
    assert set(before.tokens) == {1, 2}
    assert set(after.tokens) == {2}
    assert engine.load().running == engine.load().waiting == 0
    await engine.close()


async def test_tokens_carry_the_version_that_drew_them() -> None:
    engine, _ = await paced(frame_steps=1)
    assert engine.version == 0
    engine.start([sequence(1, max_new_tokens=1000)])
    before = await collect(engine, lambda c: len(c.deltas) == 1)
    await engine.update_weights(weights(5))
    after = await collect(engine, lambda c: c.deltas[-1].version == 5)
    assert before.deltas[0].version == 0
    assert engine.version == 5
    assert after.tokens
    await engine.close()


@pytest.mark.parametrize(
    ("start", "named"),
    [
        (SequenceStart(1, 1, [], [], Sampling(max_new_tokens=4)), "prompt is empty"),
        (SequenceStart(1, 1, [1] * 60, [2] * 4, Sampling(max_new_tokens=9)), "context of 64"),
        (SequenceStart(1, 1, [1], [2] * 4, Sampling(max_new_tokens=4)), "prefix of 4 tokens"),
    ],
)
async def test_what_cannot_be_generated_fails_with_its_cause(start: SequenceStart, named: str) -> None:
    engine, _ = await paced(max_context_tokens=64)
    engine.start([start])
    collected = await collect(engine, finished(1))
    assert collected.finishes == {1: Finish.FAILED}
    assert named in collected.causes[1]
    await engine.close()


async def test_the_context_bounds_a_sequence() -> None:
    engine, _ = await paced(max_context_tokens=16)
    engine.start([sequence(1, max_new_tokens=100)])
    collected = await collect(engine, finished(1))
    assert len(collected.tokens[1]) == 13
    assert collected.finishes[1] is Finish.LENGTH
    await engine.close()


async def test_after_a_flush_every_token_drawn_is_in_the_deltas_and_they_end() -> None:
    engine, _ = await paced(frame_steps=2, max_running=4)
    engine.start([sequence(lease, max_new_tokens=1000) for lease in (1, 2)])
    await collect(engine, lambda c: len(c.deltas) == 3)
    for _ in range(10):
        await asyncio.sleep(0)
    await engine.flush()
    drawn = engine.load().tokens_generated
    rest = await collect(engine, lambda c: False)
    assert 3 * 4 + sum(map(len, rest.tokens.values())) == drawn
    assert engine.load().tokens_generated == drawn


async def test_a_reader_that_takes_no_deltas_holds_the_engine_back() -> None:
    engine, _ = await paced(frame_steps=1)
    engine.start([sequence(1, max_new_tokens=4000)])
    for _ in range(3000):
        await asyncio.sleep(0)
    assert engine.load().tokens_generated == 256
    collected = await collect(engine, finished(1))
    assert len(collected.tokens[1]) == 4000
    await engine.close()


async def test_the_progress_buffer_holds_the_exact_count() -> None:
    buffer = memoryview(bytearray(8))
    engine, _ = await paced(progress=buffer)
    engine.start([sequence(lease, max_new_tokens=37) for lease in (1, 2, 3)])
    await collect(engine, finished(3))
    assert struct.unpack("<Q", buffer)[0] == 3 * 37 == engine.load().tokens_generated
    await engine.close()


async def test_a_dead_decode_loop_is_an_engine_error() -> None:
    async def broken(seconds: float) -> None:
        raise OSError("the clock broke")

    engine = PacedEngine(tokens_per_s=1.0, sleep=broken)
    await engine.update_weights(weights())
    engine.start([sequence(1)])
    with pytest.raises(EngineError, match="the clock broke"):
        await collect(engine, lambda c: False)


async def test_the_vocabulary_comes_from_the_models_configuration() -> None:
    engine = PacedEngine(tokens_per_s=1.0)
    assert engine.info.vocab_size == 0
    await engine.update_weights(weights(0, '{"vocab_size": 1234}'))
    assert engine.info.vocab_size == 1234
    with pytest.raises(EngineError, match=r"config\.json is not JSON"):
        await PacedEngine(tokens_per_s=1.0).update_weights(weights(0, "{"))


@pytest.mark.parametrize(
    "options",
    [{"tokens_per_s": 0.0}, {"max_running": 0}, {"frame_steps": 0}, {"max_context_tokens": 1}, {"mean_tokens": 0.5}],
)
def test_impossible_settings_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(EngineError, match="at least"):
        PacedEngine(**{"tokens_per_s": 1.0, **options})  # type: ignore[arg-type]


async def test_a_round_that_takes_minutes_is_seen_to_get_on() -> None:
    time = VirtualTime()
    engine = PacedEngine(tokens_per_s=0.1, clock=time.clock, sleep=time.sleep)
    await engine.update_weights(weights())
    engine.start([sequence(1, max_new_tokens=8)])
    seen = [(time.now, engine.load())]
    while engine.load().tokens_generated < 8:
        await asyncio.sleep(0)
        seen.append((time.now, engine.load()))
    await engine.close()
    watch = StallWatch(stall_s=20.0, now=100.0)
    assert seen[-1][0] >= 180.0
    assert [watch.stalled_for(load, now) for now, load in seen] == [0.0] * len(seen)
