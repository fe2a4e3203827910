"""The vLLM dialect over what a real server said (tests/engines/record_vllm.py records it anew)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from exchanges import RECORDED, Player, Serving
from vllm_scenes import LIMITS, SCENES

from penstock.errors import EngineError
from penstock.instance.vllm import VllmDialect, read_event
from penstock.sample import Finish

FOLDERS = [Path("/weights/first"), Path("/weights/second")]


class Replay:
    """Plays one scene against the recording."""

    def __init__(self, http: aiohttp.ClientSession, url: str, player: Player) -> None:
        self.http, self.url, self.player = http, url, player

    async def scene(self, name: str) -> Any:
        heard = await SCENES[name](VllmDialect(), self.http, self.url, FOLDERS)
        assert not self.player.missing
        return heard


@pytest.fixture
async def replay() -> AsyncIterator[Replay]:
    player = Player(RECORDED / "vllm.jsonl")
    async with Serving(player.handle) as url, aiohttp.ClientSession() as http:
        yield Replay(http, url, player)


async def test_what_the_server_says_of_itself(replay: Replay) -> None:
    facts = await replay.scene("facts")
    assert facts.software.startswith("vllm 0.")
    assert (facts.model, facts.max_running, facts.max_context_tokens) == ("/weights/first", *LIMITS)
    assert (facts.device, facts.vocab_size, facts.model_type) == ("cpu", 0, "")  # Its folder is not on this machine.


async def test_an_answer_comes_in_chunks_of_tokens_with_their_logprobs(replay: Replay) -> None:
    heard = await replay.scene("greedy")
    assert len(heard["ids"]) == len(heard["logprobs"]) == 12
    assert all(-20 < value <= 0 for value in heard["logprobs"])
    assert 1 < heard["chunks"] < 12
    assert (heard["finish"], heard["version"]) == (Finish.LENGTH, "default")


async def test_a_server_counts_what_it_does(replay: Replay) -> None:
    usage, prompts, drawn = await replay.scene("figures")
    assert usage == 0 < prompts < drawn


async def test_a_resumed_answer_is_the_rest_of_the_whole_one(replay: Replay) -> None:
    heard = await replay.scene("resumed")
    assert heard["rest"] == heard["whole"][5:]


async def test_sampling_is_asked_for_as_the_run_says(replay: Replay) -> None:
    heard = await replay.scene("sampled")
    assert len(heard["ids"]) == 12


async def test_a_stop_id_is_the_last_token(replay: Replay) -> None:
    heard = await replay.scene("stopped")
    stop = heard["whole"][3]
    assert heard["ids"] == heard["whole"][: heard["whole"].index(stop) + 1]
    assert heard["finish"] is Finish.STOP


async def test_an_aborted_answer_ends_with_the_tokens_so_far(replay: Replay) -> None:
    heard = await replay.scene("aborted")
    assert heard["aborted"]
    assert heard["finish"] is Finish.RUNNING
    assert 1 <= len(heard["ids"]) == len(heard["logprobs"]) < 150


async def test_a_request_that_is_refused_fails_with_the_servers_words(replay: Replay) -> None:
    heard = await replay.scene("refused")
    assert heard["finish"] is Finish.FAILED
    assert "the server refused the request" in heard["cause"]
    assert "max_tokens must be at least 1" in heard["cause"]


async def test_loaded_weights_answer_and_are_checked_by_their_version(replay: Replay) -> None:
    heard = await replay.scene("swapped")
    assert heard["ids"] != heard["before"]
    assert heard["version"] == "4"


async def test_weights_that_cant_be_loaded_are_an_error_after_which_the_server_goes_on(replay: Replay) -> None:
    with pytest.raises(EngineError, match="collective_rpc was refused"):
        await replay.scene("missing_weights")
    assert not replay.player.missing
    left = [exchange.path for exchange in replay.player.exchanges if exchange.path == "/resume"]
    assert len(left) == 1  # One of the recording's two is the other scene's.


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "what is no event"),
        (b'{"choices": []}', "broke a sequence off"),
        (b'{"error": {"message": "EngineDeadError"}}', "EngineDeadError"),
        (b'{"choices": [{"token_ids": [1, 2], "logprobs": null}]}', "0 log-probabilities that are not those of 2"),
        (b'{"choices": [{"token_ids": ["a"]}]}', "what is no event"),
        (b'{"choices": [{"token_ids": [], "finish_reason": "repetition"}]}', "'repetition', which is not known"),
    ],
)
def test_events_that_make_no_sense_are_errors(data: bytes, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        read_event(data)


def test_on_a_machine_without_an_accelerator_one_process_does_the_work(tmp_path: Path) -> None:
    on_cpu, on_gpu = VllmDialect(cpu=True), VllmDialect(program="other", cpu=False)
    plain = on_cpu.command(tmp_path, "127.0.0.1", 8000, {})
    assert {"--distributed-executor-backend=uni", "--no-enable-chunked-prefill"} <= set(plain)
    chunked = on_cpu.command(tmp_path, "127.0.0.1", 8000, {"enable-chunked-prefill": ""})
    assert "--no-enable-chunked-prefill" not in chunked
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in on_cpu.environment()
    split = on_cpu.command(tmp_path, "127.0.0.1", 8000, {"tensor-parallel-size": "2"})
    words = on_gpu.command(tmp_path, "127.0.0.1", 8000, {"enforce-eager": "", "port": "9000"})
    assert not any("executor" in word for word in (*split, *words)), "one process can't be two ranks"
    assert not any("chunked" in word for word in words)
    assert words[:3] == ["other", "serve", str(tmp_path)]
    assert {"--enforce-eager", "--port=9000", "--enable-scale-out"} <= set(words)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in on_gpu.environment()


def test_a_missing_logprob_is_not_a_number() -> None:
    data = b'{"choices": [{"token_ids": [3], "logprobs": {"content": [{"token_id": 3, "logprob": -9999.0}]}}]}'
    (logprob,) = read_event(data).logprobs
    assert logprob != logprob
