"""The built-in engine on two ranks says what one says, swaps on both or on neither, and dies with either."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from builtin_models import Collected, core_for, fresh_logprobs, run_to_end, staged, start, tiny_model

from penstock.errors import EngineError
from penstock.instance.builtin.engine import BuiltinEngine
from penstock.instance.builtin.rank_weights import plan_share, share_of_staged
from penstock.instance.builtin.ranks import Ranks
from penstock.instance.builtin.spec import parse_model_spec
from penstock.instance.engine import SequenceStart
from penstock.sample import Finish
from penstock.weights.manifest import StagedWeights
from penstock.weights.plan import split_tensors
from penstock.weights.quantization import quantize
from penstock.wire import Sampling

DEADLINE_S = 90.0
FAMILIES = {
    "llama": tiny_model("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "qwen2": tiny_model("qwen2", num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": tiny_model("qwen3", head_dim=16),
}
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)


@asynccontextmanager
async def engine_of(ranks: int) -> AsyncIterator[BuiltinEngine]:
    made = BuiltinEngine(device="cpu", max_context_tokens=96, threads=2, frame_steps=4, tensor_parallel=ranks)
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


async def generated(engine: BuiltinEngine, jobs: list[SequenceStart]) -> Collected:
    collected = Collected({job.lease: list(job.prefix_ids) for job in jobs})
    engine.start(jobs)
    ended = lambda: sum(finish is not Finish.RUNNING for finish in collected.finishes.values()) == len(jobs)  # noqa: E731
    await read_until(engine, collected, ended)
    return collected


def jobs_of(first_lease: int) -> list[SequenceStart]:
    """Prompts of several lengths, two that are equal, a prefix to go on from, sampled and greedy."""
    sampled = Sampling(max_new_tokens=9, temperature=1.0, top_p=0.9)
    return [
        start(first_lease, [5, 6, 7], GREEDY, seed=1),
        start(first_lease + 1, [5, 6, 7], sampled, seed=2),
        start(first_lease + 2, [90, 3, 100, 0, 51], GREEDY, prefix=[8, 9], seed=3),
        start(first_lease + 3, list(range(40)), sampled, seed=4),
    ]


def same(came: Collected, wanted: Collected) -> None:
    assert came.tokens == wanted.tokens
    for lease, logprobs in wanted.logprobs.items():
        assert came.logprobs[lease] == pytest.approx(logprobs, abs=1e-5)


async def serves(engine: BuiltinEngine, model: Any) -> None:
    await engine.update_weights(staged(model, 1))
    assert (engine.info.vocab_size, engine.info.tensor_parallel) == (101, 2)
    same(await generated(engine, jobs_of(0)), run_to_end(core_for(model), jobs_of(0)))


async def test_two_ranks_that_share_a_key_value_head_and_tied_embeddings_say_what_one_says() -> None:
    async with engine_of(2) as engine:
        await serves(engine, FAMILIES["qwen2"])


# One engine for what follows, since two processes that import PyTorch take seconds to begin.
async def test_two_ranks_say_what_one_says_swap_together_stop_together_and_die_together() -> None:
    async with engine_of(2) as engine:
        await serves(engine, FAMILIES["qwen3"])
        await swaps_and_refusals(engine)
        await stops(engine)
        await rank_dies(engine)


async def swaps_and_refusals(engine: BuiltinEngine) -> None:
    """A version that one rank can't lay out serves on none; a good one serves on both, also while sequences run."""
    other = tiny_model("qwen3", seed=9, head_dim=16)
    broken = staged(other, 2)
    tensors = dict(broken.tensors)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(EngineError, match="up_proj"):
        await engine.update_weights(StagedWeights(broken.manifest, tensors))
    ranks = engine._ranks
    assert ranks is not None
    bad = staged(other, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.instance.builtin.ranks.write_share", spoiled)
        with pytest.raises(EngineError, match=r"rank 1: WeightError: .* does not verify"):
            await engine.update_weights(bad)
    assert engine.version == 1
    same(await generated(engine, jobs_of(10)), run_to_end(core_for(FAMILIES["qwen3"]), jobs_of(10)))
    prompts = {20: [4, 4], 21: [5] * 30, 22: [6]}
    collected = Collected()
    engine.start([start(lease, prompt, Sampling(max_new_tokens=60)) for lease, prompt in prompts.items()])
    await read_until(engine, collected, lambda: len(collected.tokens) == 3)
    # Read while it swaps: with nobody who reads, weights don't wait for a sequence to be prefilled with them.
    swapping = asyncio.create_task(engine.update_weights(staged(other, 4)))
    await read_until(engine, collected, lambda: all(finish is Finish.LENGTH for finish in collected.finishes.values()))
    await swapping
    for lease, prompt in prompts.items():
        tokens, versions = collected.tokens[lease], collected.versions[lease]
        assert set(versions) == {1, 4}
        cut = versions.index(4)
        old, new = (fresh_logprobs(model, prompt, tokens) for model in (FAMILIES["qwen3"], other))
        expected = torch.cat((old[:cut], new[cut:]))
        torch.testing.assert_close(torch.tensor(collected.logprobs[lease]), expected, atol=1e-4, rtol=0)
    same(await generated(engine, jobs_of(30)), run_to_end(core_for(other), jobs_of(30)))


def spoiled(plan: Any, tensors: Any, into: memoryview) -> Any:
    """What arrives at the other rank is not what was sent."""
    from penstock.instance.builtin.rank_weights import write_share

    entries = write_share(plan, tensors, into)
    into[len(into) // 2] ^= 1
    return entries


async def stops(engine: BuiltinEngine) -> None:
    """One that is stopped moves the others in the caches of both ranks."""
    other = tiny_model("qwen3", seed=9, head_dim=16)
    jobs = [start(40 + n, [n + 1, 3], Sampling(max_new_tokens=40, temperature=0.0)) for n in range(3)]
    collected = Collected()
    engine.start(jobs)
    await read_until(engine, collected, lambda: len(collected.tokens) == 3)
    engine.stop([40])
    await read_until(engine, collected, lambda: all(collected.finishes[n] is Finish.LENGTH for n in (41, 42)))
    alone = run_to_end(core_for(other), jobs)
    assert {n: collected.tokens[n] for n in (41, 42)} == {n: alone.tokens[n] for n in (41, 42)}


async def rank_dies(engine: BuiltinEngine) -> None:
    """With nothing to do, so that no sum breaks off: the death itself is what ends the engine, by name."""
    ranks = engine._ranks
    assert ranks is not None
    os.kill(ranks.pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"tensor-parallel rank 1 died \(killed by SIGKILL\)"):
        await read_until(engine, Collected(), lambda: False)
    with pytest.raises(EngineError, match="rank 1 died"):
        engine.start(jobs_of(50))


async def test_a_rank_that_dies_in_mid_step_ends_the_engine_by_name_and_close_leaves_nothing() -> None:
    async with engine_of(2) as engine:
        await serves(engine, FAMILIES["llama"])
        ranks = engine._ranks
        assert ranks is not None
        pid = ranks.pids[0]
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches the whole group, and is the leader's to answer.
        engine.start([start(100 + n, [1, 2], Sampling(max_new_tokens=90)) for n in range(8)])
        collected = Collected()
        await read_until(engine, collected, lambda: bool(collected.tokens))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 died"):
            await read_until(engine, collected, lambda: False)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_swap_that_a_rank_does_not_answer_ends_the_engine_and_not_the_swap_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may take the new weights later on, beside others that went on with the old ones."""
    async with engine_of(2) as engine:
        await engine.update_weights(staged(FAMILIES["llama"], 1))
        ranks = engine._ranks
        assert ranks is not None
        stops_before_the_swap(ranks, monkeypatch)
        other = tiny_model("llama", seed=9, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
        with pytest.raises(EngineError, match=r"engine ended: tensor-parallel rank 1 does not answer: .* 0\.5 s"):
            await engine.update_weights(staged(other, 2))
        os.kill(ranks.pids[0], signal.SIGCONT)
        with pytest.raises(EngineError, match="rank 1 does not answer"):
            await read_until(engine, Collected(), lambda: False)


def stops_before_the_swap(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank lays a version out and says so, and is then stopped."""
    prepare = ranks.prepare

    def prepared(*args: Any) -> None:
        prepare(*args)
        os.kill(ranks.pids[0], signal.SIGSTOP)

    monkeypatch.setattr(ranks, "prepare", prepared)
    monkeypatch.setattr("penstock.instance.builtin.ranks.STEP_S", 0.5)
    monkeypatch.setattr("penstock.instance.builtin.ranks.CAUSE_S", 0.0)


async def test_a_version_that_a_rank_does_not_lay_out_in_time_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer would be taken for that to the next version."""
    async with engine_of(2) as engine:
        await engine.update_weights(staged(FAMILIES["llama"], 1))
        ranks = engine._ranks
        assert ranks is not None
        monkeypatch.setattr("penstock.instance.builtin.ranks.PREPARE_S", 0.5)
        monkeypatch.setattr("penstock.instance.builtin.ranks.CAUSE_S", 0.0)
        os.kill(ranks.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"engine died: tensor-parallel rank 1 does not answer: .* 0\.5 s"):
            await engine.update_weights(staged(FAMILIES["llama"], 2))
        os.kill(ranks.pids[0], signal.SIGCONT)
        with pytest.raises(EngineError, match="rank 1 does not answer"):
            await read_until(engine, Collected(), lambda: False)
        monkeypatch.setattr(ranks, "prepare", lambda *_: pytest.fail("a dead engine lays nothing out"))
        with pytest.raises(EngineError, match="rank 1 does not answer"):
            await engine.update_weights(staged(FAMILIES["llama"], 3))


async def test_a_rank_that_can_not_be_told_of_a_version_leaves_no_answer_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", num_attention_heads=3, num_key_value_heads=3, intermediate_size=81)
    async with engine_of(3) as engine:
        await engine.update_weights(staged(model, 1))
        ranks = engine._ranks
        assert ranks is not None
        first, second = ranks._members
        with monkeypatch.context() as patch:
            patch.setattr(second, "prepare", no_memory)
            with pytest.raises(EngineError, match=r"version 2 is not laid out by all ranks: rank 2: no memory$"):
                await engine.update_weights(staged(model, 2))
        with monkeypatch.context() as patch:
            patch.setattr(first, "prepare", spoiling(first.prepare))
            with pytest.raises(EngineError, match=r"version 3 is not laid out by .* rank 1: .* does not verify"):
                await engine.update_weights(staged(model, 3))
        await engine.update_weights(staged(model, 4))
        same(await generated(engine, jobs_of(0)), run_to_end(core_for(model), jobs_of(0)))


def no_memory(*_: Any) -> None:
    raise EngineError("no memory")


def spoiling(prepare: Callable[..., None]) -> Callable[..., None]:
    def spoilt(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.instance.builtin.ranks.write_share", spoiled)
            prepare(*args)

    return spoilt


async def test_a_rank_that_can_not_begin_ends_the_engine_at_its_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with engine_of(2) as engine:
        with pytest.raises(EngineError, match=r"rank 1 died \(exit code 1\)"):
            await engine.update_weights(staged(FAMILIES["llama"]))
        with pytest.raises(EngineError, match="rank 1 died"):
            await read_until(engine, Collected(), lambda: False)


def test_a_rank_ends_when_its_leader_is_killed(tmp_path: Path) -> None:
    program = (
        "from penstock.instance.builtin.ranks import Ranks\n"
        "ranks = Ranks(2, 1, print)\n"
        "print(ranks.pids[0], flush=True)\n"
        "input()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    try:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
    finally:
        leader.kill()
        leader.wait()
    deadline = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A process that has ended may wait for a parent that does not come."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("scheme", ["", "int8"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_rank_takes_about_its_share_of_the_bytes(family: str, scheme: str) -> None:
    weights = staged(FAMILIES[family])
    if scheme:
        stream = b"".join(bytes(weights.tensors[entry.name]) for entry in weights.manifest.tensors)
        manifest, codes = quantize(weights.manifest, memoryview(stream), scheme)
        weights = StagedWeights(manifest=manifest, tensors=split_tensors(manifest, codes))
    spec = parse_model_spec(weights.manifest.config_json)
    matrices = sum(entry.nbytes for entry in weights.manifest.tensors if len(entry.shape) == 2)
    rest = weights.manifest.raw_nbytes - matrices
    for rank in (0, 1):
        fetched = plan_share(weights, spec, rank, 2).fetched_bytes
        # Key and value of the one head of qwen2 are on both.
        assert fetched <= matrices * (0.56 if family == "qwen2" or scheme else 0.51) + rest
        assert {entry.name for entry in share_of_staged(weights, spec, rank, 2).manifest.tensors} == {
            entry.name for entry in weights.manifest.tensors
        }


def test_a_model_that_two_ranks_can_not_share_is_refused_by_name() -> None:
    spec = parse_model_spec(staged(FAMILIES["llama"]).manifest.config_json)
    with pytest.raises(EngineError, match="tensor_parallel=3"):
        spec.share_of(3)


async def test_options_that_make_no_sense_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="tensor_parallel is 0"):
        BuiltinEngine(device="cpu", tensor_parallel=0)
    monkeypatch.setattr("penstock.instance.builtin.engine.resolve_device", lambda _: torch.device("cuda", 0))
    with pytest.raises(EngineError, match="for device cpu"):
        BuiltinEngine(device="cuda", tensor_parallel=2)
