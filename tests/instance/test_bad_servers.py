"""Engine servers that are not what they say, or say what no sound server says: told at both ends, with the reason.

Real manager, real agent, a server that misbehaves: what its agent's own screen and the manager's events say of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fleets import TOKEN, VOCAB, Fleet, until
from stand_in_server import StandIn

from penstock.errors import EngineError
from penstock.instance.served import ServedEngine
from penstock.instance.supervise import AdoptedServer
from penstock.instance.vllm import VllmDialect
from penstock.instance.weight_folder import WeightFolders
from penstock.weights import WeightStore
from penstock.wire import Sampling

SAMPLING = Sampling(max_new_tokens=40)


@pytest.fixture
def store() -> Iterator[WeightStore]:
    held = WeightStore("run", "127.0.0.1", 0, TOKEN, chunk_bytes=256)
    held.start()
    held.publish(0, [("w", "F32", (10,), bytes(40))], json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    yield held
    held.close()


def served(url: str, folder: Path) -> ServedEngine:
    dialect = VllmDialect()
    folders = WeightFolders([folder])
    return ServedEngine(dialect, AdoptedServer(dialect, url), max_running=4, max_context_tokens=64, folders=folders)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StandIn]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    async with StandIn(tmp_path / "model") as standing:
        yield standing


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("outside", f"drew token id {VOCAB}, which is outside the vocabulary of {VOCAB}"),
        ("nan", "the log-probability nan"),
        ("other version", "draws with its weight version '999' and should serve 0"),
        ("too few", "log-probabilities that are not those of"),
    ],
)
async def test_a_server_that_says_what_no_sound_server_says_is_given_up_and_both_ends_hear_why(
    store: WeightStore, server: StandIn, tmp_path: Path, how: str, reason: str
) -> None:
    server.behave = lambda body: how
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        engine = served(server.url, tmp_path)
        fleet.join("broken", engine=engine)
        batch = await fleet.submit()
        await until(lambda: fleet.ends("broken"))
        with pytest.raises(EngineError) as said:
            await asyncio.wait_for(fleet.agents["broken"][1], 60)
        [end] = fleet.ends("broken")
        assert (reason in str(said.value), reason in end.cause, end.orderly) == (True, True, False), end.cause
        fleet.join("sound")
        # Not a token of it was taken; but vLLM tells its weight version with a sequence's last tokens only.
        await (batch.finished() if how == "other version" else batch.whole())
        await engine.close()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llama", "vocab_size": VOCAB + 14}, f"vocab_size={VOCAB + 14}, and the run's model has"),
        ({"model_type": "qwen2", "vocab_size": VOCAB}, "model_type=qwen2, and the run's model has"),
    ],
)
async def test_a_server_of_another_model_or_vocabulary_is_refused_and_both_ends_hear_why(
    store: WeightStore,
    server: StandIn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object],
    reason: str,
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    async with Fleet(SAMPLING) as fleet:
        await fleet.client.publish(0, store.address)
        engine = served(server.url, tmp_path)
        with caplog.at_level(logging.ERROR, logger="penstock.agent"):
            fleet.join("another", engine=engine)
            await until(lambda: any(reason in json.dumps(str(event)) for event in fleet.events))
        assert reason in caplog.text
        assert not server.folders, "it was given no weights"
        await engine.close()
