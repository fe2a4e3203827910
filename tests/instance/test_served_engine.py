"""An engine over a server: what it asks when, what it refuses, and that no token is lost or drawn twice."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from builtin_models import Collected, start
from stand_in_server import VOCAB, StandIn, token

from penstock.errors import ConfigError, EngineError
from penstock.instance import outgoing, served, weight_folder
from penstock.instance.dialects import DIALECTS, dialect_of
from penstock.instance.engine import Engine
from penstock.instance.liveness import StallWatch
from penstock.instance.model_folder import config_of
from penstock.instance.served import ServedEngine
from penstock.instance.supervise import AdoptedServer
from penstock.instance.vllm import VllmDialect
from penstock.instance.weight_folder import WeightFolders
from penstock.sample import Finish
from penstock.weights.manifest import Manifest, StagedWeights, TensorEntry
from penstock.wire import Sampling

WITHIN_S = 30.0
PROMPT = [5, 6, 7]


def weights(version: int, shape: tuple[int, ...] = (4, 2), vocab_size: int = VOCAB) -> StagedWeights:
    raw = memoryview(bytearray(range(4 * shape[0] * shape[1])))
    entry = TensorEntry(name="w", dtype="F32", shape=shape, nbytes=raw.nbytes, xxh3=0)
    config = json.dumps({"model_type": "llama", "vocab_size": vocab_size})
    manifest = Manifest(
        run="t", version=version, codec="raw", base=None, config_json=config, tensors=(entry,), chunks=()
    )
    return StagedWeights(manifest=manifest, tensors={"w": raw})


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a server was started on by somebody else."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    return folder


@pytest.fixture
async def server(model: Path) -> AsyncIterator[StandIn]:
    async with StandIn(model) as standing:
        yield standing


@pytest.fixture
async def engine(server: StandIn, tmp_path: Path) -> AsyncIterator[ServedEngine]:
    made = engine_at(server.url, tmp_path)
    await made.update_weights(weights(0))
    yield made
    await made.close()


def engine_at(url: str, folder: Path, **options: Any) -> ServedEngine:
    dialect = VllmDialect()
    options = {"max_running": 4, "max_context_tokens": 64, "folders": WeightFolders([folder])} | options
    return ServedEngine(dialect, AdoptedServer(dialect, url), **options)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


async def collect(engine: Engine, collected: Collected, done: Callable[[], bool]) -> Collected:
    async with asyncio.timeout(WITHIN_S):
        async for delta in engine.deltas():
            collected.add(delta)
            if done():
                return collected
    raise AssertionError("the deltas ended")


async def finished(engine: Engine, leases: list[int], collected: Collected | None = None) -> Collected:
    collected = collected or Collected()
    return await collect(engine, collected, lambda: all(collected.finishes.get(lease) for lease in leases))


def there(folder: str) -> bool:
    return os.path.isdir(folder)


def expected(count: int, version: int = 0, begin: int = 0) -> list[int]:
    return [token(PROMPT[0], place, str(version)) for place in range(begin, begin + count)]


async def test_an_engine_over_a_server_is_an_engine(engine: ServedEngine, server: StandIn) -> None:
    assert isinstance(engine, Engine)
    assert (engine.info.kind, engine.info.vocab_size, engine.version) == ("vllm", VOCAB, 0)
    leases = list(range(10))
    engine.start([start(lease, PROMPT, Sampling(max_new_tokens=9)) for lease in leases])
    assert (engine.load().running, engine.load().waiting) == (4, 6)
    collected = await finished(engine, leases)
    assert all(collected.tokens[lease] == expected(9) for lease in leases)
    assert collected.logprobs[3] == pytest.approx([-drawn / 64 for drawn in expected(9)])
    assert set(collected.finishes.values()) == {Finish.LENGTH}
    assert collected.versions[0] == [0] * 9
    assert server.most_running == 4
    load = engine.load()
    assert (load.tokens_generated, load.tokens_prefilled, load.running, load.waiting) == (90, 30, 0, 0)


async def test_an_engine_has_the_ranks_of_its_configuration_until_the_server_says_how_many_it_has(
    server: StandIn, tmp_path: Path
) -> None:
    server.tensor_parallel = 4
    engine = engine_at(server.url, tmp_path, tensor_parallel=2)
    assert engine.info.tensor_parallel == 2
    await engine.update_weights(weights(0))
    assert engine.info.tensor_parallel == 4
    await engine.close()


async def test_sampling_becomes_the_servers_words_and_a_prefix_counts(engine: ServedEngine, server: StandIn) -> None:
    engine.frame_steps = 3
    stop = token(PROMPT[0], 6, "0")
    sampling = Sampling(max_new_tokens=20, temperature=0.5, top_p=0.9, top_k=7, stop_ids=(stop,))
    prefix = expected(4)
    engine.start([start(1, PROMPT, sampling, prefix=prefix)])
    collected = await finished(engine, [1], Collected({1: prefix}))
    assert collected.tokens[1] == expected(7)
    assert collected.finishes[1] is Finish.STOP
    asked = server.requests[0]
    assert asked["token_ids"] == PROMPT + prefix
    words = asked["sampling_params"]
    assert (words["max_tokens"], words["temperature"], words["top_p"], words["top_k"]) == (16, 0.5, 0.9, 7)
    assert (words["stop_token_ids"], words["ignore_eos"], words["stream_interval"]) == ([stop], True, 3)
    engine.start([start(2, PROMPT, sampling, seed=1001), start(3, PROMPT, sampling, prefix=prefix, seed=1001)])
    await finished(engine, [2, 3], Collected({3: prefix}))
    seeds = [request["sampling_params"]["seed"] for request in server.requests]
    assert seeds[0] == seeds[2] != seeds[1]  # By sample and place: 1 and 3 are alike.


async def test_a_sequence_ends_at_the_context(engine: ServedEngine, server: StandIn) -> None:
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=1000))])
    collected = await finished(engine, [1])
    assert len(collected.tokens[1]) == 64 - len(PROMPT)
    assert collected.finishes[1] is Finish.LENGTH


@pytest.mark.parametrize(
    ("prompt", "prefix", "cause"),
    [
        ([], [], "prompt is empty"),
        ([VOCAB], [], "outside the vocabulary"),
        ([1] * 64, [], "no room in a context of 64"),
        ([1], [2] * 9, "leaves none of max_new_tokens"),
    ],
)
async def test_what_cant_be_generated_fails_with_its_cause(
    engine: ServedEngine, prompt: list[int], prefix: list[int], cause: str
) -> None:
    engine.start([start(1, prompt, Sampling(max_new_tokens=9), prefix=prefix)])
    collected = await finished(engine, [1], Collected({1: prefix}))
    assert collected.finishes[1] is Finish.FAILED
    assert cause in collected.causes[1]


async def test_a_request_that_the_server_refuses_fails_alone(engine: ServedEngine, server: StandIn) -> None:
    server.behave = lambda body: "refuse" if body["token_ids"][0] == 9 else ""
    engine.start([start(1, [9, 9, 9], Sampling(max_new_tokens=4)), start(2, PROMPT, Sampling(max_new_tokens=4))])
    collected = await finished(engine, [1, 2])
    assert collected.finishes == {1: Finish.FAILED, 2: Finish.LENGTH}
    assert "I would rather not" in collected.causes[1]


async def test_stop_closes_the_request_and_the_next_one_takes_its_place(engine: ServedEngine, server: StandIn) -> None:
    server.gate.clear()
    engine.start([start(lease, PROMPT, Sampling(max_new_tokens=8)) for lease in range(5)])
    await until(lambda: server.running == 4)
    engine.stop([0, 99])
    await until(lambda: server.disconnects == 1 and len(server.requests) == 5)
    server.gate.set()
    collected = await finished(engine, [1, 2, 3, 4])
    assert 0 not in collected.tokens


async def test_a_swap_keeps_what_was_drawn_and_goes_on_with_the_new_weights(
    engine: ServedEngine, server: StandIn
) -> None:
    server.gate.clear()
    engine.start([start(lease, PROMPT, Sampling(max_new_tokens=12)) for lease in range(6)])
    await until(lambda: engine.load().tokens_generated == 4 * 2)
    collected = Collected()
    reader = asyncio.create_task(finished(engine, list(range(6)), collected))
    old = server.folders[-1]
    await engine.update_weights(weights(1))
    server.gate.set()
    await reader
    for lease in range(4):
        assert collected.tokens[lease] == expected(2) + expected(10, version=1, begin=2)
        assert collected.versions[lease] == [0] * 2 + [1] * 10
    assert collected.versions[5] == [1] * 12
    assert engine.version == 1
    assert (there(server.folders[-1]), there(old)) == (True, False)
    assert server.calls["/reset_prefix_cache"] == server.calls["/resume"] == 2


async def test_a_failed_swap_leaves_the_old_weights_serving(engine: ServedEngine, server: StandIn) -> None:
    server.load_fails = lambda folder: folder.endswith("version-1")
    with pytest.raises(EngineError, match="no such weights"):
        await engine.update_weights(weights(1))
    assert engine.version == 0
    assert [folder.rpartition("-")[2] for folder in server.folders] == ["0", "1", "0"]
    assert not there(server.folders[1])
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=6))])
    assert (await finished(engine, [1])).tokens[1] == expected(6)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("keeps the cache", "did not drop its prefix cache"),
        ("another version", "was given weight version 1 and says .*'0'"),
    ],
)
async def test_a_swap_is_checked_and_one_that_is_not_whole_leaves_the_old_weights_serving(
    engine: ServedEngine, server: StandIn, how: str, reason: str
) -> None:
    if how == "keeps the cache":
        server.keeps_cache = lambda folder: folder.endswith("version-1")
    else:
        server.deaf_to = "1"
    with pytest.raises(EngineError, match=reason):
        await engine.update_weights(weights(1))
    assert engine.version == 0
    assert [folder.rpartition("-")[2] for folder in server.folders] == ["0", "1", "0"]
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=6))])
    assert (await finished(engine, [1])).tokens[1] == expected(6)


async def test_a_failed_swap_to_other_weights_of_the_same_number_leaves_the_old_ones_serving(
    engine: ServedEngine, server: StandIn
) -> None:
    """As a trainer publishes them that goes on from an earlier checkpoint."""
    (old,) = server.folders
    others = weights(0)
    others.tensors["w"][0] = 1
    read: list[bytes] = []

    def fails(folder: str) -> bool:
        read.append((Path(folder) / "model.safetensors").read_bytes())
        return folder != old

    server.load_fails = fails
    with pytest.raises(EngineError, match="no such weights"):
        await engine.update_weights(others)
    refused, again = read
    assert (refused[-32:], again[-32:]) == (bytes(others.tensors["w"]), bytes(weights(0).tensors["w"]))
    server.load_fails = lambda folder: False
    await engine.update_weights(others)
    assert not there(old)
    assert [path.name for path in Path(server.folders[-1]).parent.glob("*version*")] == [Path(server.folders[-1]).name]


async def test_an_engine_whose_old_weights_cant_be_had_back_is_given_up(engine: ServedEngine, server: StandIn) -> None:
    server.load_fails = lambda folder: True
    with pytest.raises(EngineError):
        await engine.update_weights(weights(1))
    with pytest.raises(EngineError, match="no weights can be relied on"):
        await finished(engine, [1])
    with pytest.raises(EngineError, match="no weights can be relied on"):
        engine.start([start(1, PROMPT, Sampling(max_new_tokens=6))])


async def test_weights_that_no_place_takes_are_refused_and_the_old_ones_serve(
    engine: ServedEngine, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_folder, "_room", lambda parent: 10)
    with pytest.raises(EngineError, match=r"can't be written .* has 0 MiB left"):
        await engine.update_weights(weights(1))
    assert (engine.version, len(server.folders)) == (0, 1)


@pytest.mark.parametrize(
    ("other", "reason"),
    [(weights(1, shape=(3, 2)), "tensor w was"), (weights(1, vocab_size=60), "vocab_size was 50 and is 60")],
)
async def test_weights_of_another_model_are_refused(engine: ServedEngine, other: StagedWeights, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        await engine.update_weights(other)
    assert engine.version == 0


@pytest.mark.parametrize(
    ("config", "context", "reason"),
    [
        ({"model_type": "llama", "vocab_size": 60}, 512, "vocab_size=60"),
        ({"model_type": "qwen2", "vocab_size": VOCAB}, 512, "model_type=qwen2"),
        ({"model_type": "llama", "vocab_size": VOCAB}, 32, "context of 32 tokens"),
        ({}, 512, "no config.json that says what model that is"),
    ],
)
async def test_a_server_of_another_model_is_refused(
    tmp_path: Path, config: dict[str, Any], context: int, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with StandIn(tmp_path, max_context_tokens=context) as server:
        engine = engine_at(server.url, tmp_path)
        with pytest.raises(EngineError, match=reason):
            await engine.update_weights(weights(0))
        assert engine.version == -1
        await engine.close()


async def test_a_server_whose_figures_would_not_be_the_models_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 50, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    async with StandIn(tmp_path) as server:
        engine = engine_at(server.url, tmp_path)
        server.logprobs_mode = "processed_logprobs"
        with pytest.raises(EngineError, match="start it with raw_logprobs"):
            await engine.update_weights(weights(0))
        server.logprobs_mode, server.device = "raw_logprobs", "cpu"
        with pytest.raises(EngineError, match="only one side of tied embeddings"):
            await engine.update_weights(weights(0))
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        with pytest.raises(EngineError, match="start the server with --no-enable-chunked-prefill"):
            await engine.update_weights(weights(0))
        assert server.folders == [], "nothing was loaded into it"
        server.device = "cuda"
        await engine.update_weights(weights(0))
        assert engine.version == 0
        await engine.close()


async def test_an_address_where_no_server_is_is_refused(tmp_path: Path) -> None:
    engine = engine_at("http://127.0.0.1:9", tmp_path)
    with pytest.raises(EngineError, match=r"no vllm server answers at http://127\.0\.0\.1:9"):
        await engine.update_weights(weights(0))
    await engine.close()
    with pytest.raises(ConfigError, match="without a path"):
        engine_at("http://127.0.0.1:9/v1", tmp_path)


@pytest.mark.parametrize("how", ["abort", "cut"])
async def test_a_sequence_that_the_server_drops_goes_on_from_its_last_token(
    engine: ServedEngine, server: StandIn, how: str
) -> None:
    server.behave = lambda body: how if len(server.requests) <= 3 else ""
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=12))])
    collected = await finished(engine, [1])
    assert collected.tokens[1] == expected(12)
    assert [len(body["token_ids"]) - 3 for body in server.requests] == [0, 2, 4, 6]


async def test_a_server_with_other_weights_is_given_up_before_any_sequence_ends(
    engine: ServedEngine, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM names its weights with a sequence's last tokens, which may be an hour away."""
    monkeypatch.setattr(served, "WORK_POLL_S", 0.01)
    server.behave = lambda body: "hang"
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=12))])
    await until(lambda: engine.load().work_done)
    server.version = "5"
    with pytest.raises(EngineError, match="weight version '5' and should serve 0; was it started again"):
        await finished(engine, [1])


async def test_a_server_that_was_started_again_draws_nothing_on(engine: ServedEngine, server: StandIn) -> None:
    def started_again(body: dict[str, Any]) -> str:
        server.version = "default"
        return "cut"

    server.behave = started_again
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=12))])
    with pytest.raises(EngineError, match="weight version 'default' and should serve 0"):
        await finished(engine, [1])
    assert len(server.requests) == 1


async def test_one_that_is_dropped_again_and_again_fails_with_its_cause(engine: ServedEngine, server: StandIn) -> None:
    server.behave = lambda body: "abort"
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=30))])
    collected = await finished(engine, [1])
    assert collected.finishes[1] is Finish.FAILED
    assert "ended it 4 times before its end" in collected.causes[1]
    assert collected.tokens[1] == expected(8)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nan", "log-probability nan"),
        ("outside", "token id 50, which is outside the vocabulary of 50"),
        ("too few", "1 log-probabilities that are not those of 2 tokens"),
        ("error", "the engine is dead"),
        ("other version", "draws with its weight version '999' and should serve 0"),
    ],
)
async def test_a_server_that_says_what_no_sound_server_says_is_given_up(
    engine: ServedEngine, server: StandIn, how: str, reason: str
) -> None:
    server.behave = lambda body: how
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=4))])
    with pytest.raises(EngineError, match=reason):
        await finished(engine, [1])


async def test_a_server_that_goes_takes_its_engine_with_it_after_the_last_tokens(
    engine: ServedEngine, server: StandIn
) -> None:
    server.gate.clear()
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=8))])
    collected = Collected()
    await collect(engine, collected, lambda: len(collected.tokens.get(1, [])) == 2)
    await server.close()
    with pytest.raises(EngineError, match=r"the vllm server at .* is gone"):
        await finished(engine, [1], collected)


async def test_a_server_that_hangs_counts_as_stuck(engine: ServedEngine, server: StandIn) -> None:
    server.behave = lambda body: "hang"
    watch = StallWatch(60.0, 0.0)
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=8))])
    await until(lambda: server.running == 1)
    assert watch.stalled_for(engine.load(), 1.0) == 0
    assert watch.stalled_for(engine.load(), 62.0) > 60


async def test_a_prefill_that_takes_its_time_does_not(
    engine: ServedEngine, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "WORK_POLL_S", 0.01)
    server.behave = lambda body: "hang"
    watch = StallWatch(60.0, 0.0)
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=8))])
    for chunk in range(1, 4):
        server.cache_usage = chunk / 10
        await until(lambda seen=chunk: engine.load().work_done == seen)
        assert watch.stalled_for(engine.load(), 50.0 * chunk) == 0
    asked = server.calls["/metrics"]
    await until(lambda: server.calls["/metrics"] > asked + 3)
    assert watch.stalled_for(engine.load(), 150.0 + 61.0) > 60, "it filled no more of its cache"


async def test_a_server_on_a_cpu_that_computes_within_one_long_step_is_not_stuck(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "WORK_POLL_S", 0.01)
    server.device, server.chunked_prefill = "cpu", False
    server.behave = lambda body: "hang"
    computed = itertools.chain((1.0, 2.0, 3.0), itertools.repeat(3.05))  # Then it waits: that takes next to nothing.
    monkeypatch.setattr(AdoptedServer, "cpu_s", lambda self: next(computed))
    engine = engine_at(server.url, tmp_path)
    await engine.update_weights(weights(0))
    engine.start([start(1, PROMPT, Sampling(max_new_tokens=8))])
    asked = server.calls["/metrics"]
    await until(lambda: server.calls["/metrics"] > asked + 6)
    assert engine.load().work_done == 3 + 1, "three times by the clock, and once that it said anything"
    await engine.close()


async def test_a_flush_gives_the_last_tokens_and_draws_no_more(engine: ServedEngine, server: StandIn) -> None:
    server.gate.clear()
    engine.start([start(lease, PROMPT, Sampling(max_new_tokens=8)) for lease in range(6)])
    await until(lambda: engine.load().tokens_generated == 8)
    await engine.flush()
    collected = Collected()
    await collect(engine, collected, lambda: len(collected.tokens) == 4)
    assert all(drawn == expected(2) for drawn in collected.tokens.values())
    server.gate.set()
    assert (server.running, len(server.requests)) == (0, 4)


async def test_handing_over_gives_the_last_tokens_runs_nothing_on_and_takes_new_work(
    engine: ServedEngine, server: StandIn
) -> None:
    server.gate.clear()
    engine.start([start(lease, PROMPT, Sampling(max_new_tokens=8)) for lease in range(6)])
    await until(lambda: engine.load().tokens_generated == 8)
    await engine.hand_over()
    collected = Collected()
    await collect(engine, collected, lambda: len(collected.tokens) == 4)
    assert all(drawn == expected(2) for drawn in collected.tokens.values())
    engine.stop(list(range(6)))
    server.gate.set()
    # The two that waited are not begun, and what comes next is.
    assert (server.running, len(server.requests), engine.load().waiting) == (0, 4, 0)
    engine.start([start(9, PROMPT, Sampling(max_new_tokens=4))])
    assert (await finished(engine, [9])).tokens[9] == expected(4)


async def test_tokens_that_nobody_takes_are_not_read_on(
    engine: ServedEngine, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "GATHER_S", 0.0)
    server.gate.clear()
    for unread in range(1, outgoing.UNREAD_DELTAS + 2):
        engine.start([start(unread, PROMPT, Sampling(max_new_tokens=2))])
        await until(lambda seen=unread: len(server.requests) == seen and server.running == 0)
        await until(lambda seen=unread: engine.load().tokens_generated == 2 * min(seen, outgoing.UNREAD_DELTAS))
    assert engine.load().tokens_generated == 2 * outgoing.UNREAD_DELTAS
    server.gate.set()
    collected = await finished(engine, [1, 2, 3])
    assert collected.tokens[3] == expected(2)


async def test_the_progress_file_counts_on_over_engines(server: StandIn, tmp_path: Path) -> None:
    progress = memoryview(bytearray(8))
    for ordinal in (1, 2):
        engine = engine_at(server.url, tmp_path, progress=progress)
        await engine.update_weights(weights(0))
        engine.start([start(1, PROMPT, Sampling(max_new_tokens=5))])
        await finished(engine, [1])
        await engine.close()
        assert int.from_bytes(progress, "little") == 5 * ordinal


# ---- the weights' folders


def test_a_folder_is_what_safetensors_reads_with_the_dtype_said(tmp_path: Path) -> None:
    from safetensors import safe_open

    folders = WeightFolders([tmp_path / "is-not-there", tmp_path])
    folder = folders.write(weights(3))
    with safe_open(folder / "model.safetensors", "np") as file:
        read = file.get_tensor("w")
    assert (read.shape, read.tobytes()) == ((4, 2), bytes(range(32)))
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    folders.close()
    assert os.listdir(tmp_path) == []


def test_tied_embeddings_are_written_twice_where_that_is_asked_for(tmp_path: Path) -> None:
    from safetensors import safe_open

    raw = memoryview(bytearray(32))
    entry = TensorEntry(name="model.embed_tokens.weight", dtype="F32", shape=(4, 2), nbytes=32, xxh3=0)
    manifest = Manifest(
        run="t",
        version=0,
        codec="raw",
        base=None,
        config_json='{"tie_word_embeddings": true}',
        tensors=(entry,),
        chunks=(),
    )
    staged = StagedWeights(manifest=manifest, tensors={entry.name: raw})
    for untie, names in ((False, [entry.name]), (True, ["lm_head.weight", entry.name])):
        folders = WeightFolders([tmp_path], untie=untie)
        folder = folders.write(staged)
        with safe_open(folder / "model.safetensors", "np") as file:
            assert sorted(file.keys()) == names
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is not untie
        folders.close()


def test_the_folders_of_an_engine_that_was_killed_are_removed_by_the_next_one(tmp_path: Path) -> None:
    living = WeightFolders([tmp_path])
    kept = living.write(weights(0))
    orphan = tmp_path / f"{weight_folder.FOLDER_PREFIX}orphan"
    orphan.mkdir()
    (orphan / "lock").touch()
    WeightFolders([tmp_path])
    assert kept.is_dir()
    assert not orphan.exists()
    living.close()


@pytest.mark.parametrize("closed_at", ["begin", "end"])
def test_an_engine_that_is_closed_while_a_version_is_written_leaves_nothing_of_it(
    closed_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for parent in (first, second):
        parent.mkdir()
    folders, write = WeightFolders([first, second]), weight_folder.write_safetensors

    def closing(path: Path, tensors: weight_folder.Tensors) -> None:
        if closed_at == "begin":
            folders.close()
            path.parent.mkdir(parents=True)  # As where the close was just before it.
        write(path, tensors)
        folders.close()

    monkeypatch.setattr(weight_folder, "write_safetensors", closing)
    with pytest.raises(EngineError, match="closed while a weight version was written"):
        folders.write(weights(0))
    with pytest.raises(EngineError, match="closed while a weight version was written"):
        folders.write(weights(1))
    assert [*first.iterdir(), *second.iterdir()] == []


def test_an_engine_that_begins_beside_another_takes_none_of_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def beside(file: int, operation: int) -> None:
        if not swept:
            swept.append(True)
            weight_folder.remove_orphans(tmp_path)
        lock(file, operation)

    monkeypatch.setattr(weight_folder.fcntl, "flock", beside)
    folders = WeightFolders([tmp_path])
    assert folders.write(weights(0)).is_dir()
    assert len(swept) == 1
    folders.close()
    assert list(tmp_path.iterdir()) == []


# ---- what a server's model is


def test_a_model_is_known_by_its_folder_or_by_its_name_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"vocab_size": 7}')
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert config_of("some/model") == config_of(str(snapshot)) == {"vocab_size": 7}
    assert config_of("some/other") == config_of(str(tmp_path)) == {}


def test_there_is_a_dialect_for_every_kind_and_no_other() -> None:
    assert [dialect_of(kind).kind for kind in DIALECTS] == list(DIALECTS)
    with pytest.raises(ConfigError, match="there are: vllm, sglang"):
        dialect_of("llama")
