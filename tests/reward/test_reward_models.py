"""Reward models behind inference servers: what goes out in one call, and which number comes back as the reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reward_support import build_sample

from penstock.errors import ConfigError
from penstock.reward import ComputePool, Endpoint, Score, Unscored, load_function
from penstock.reward.retry import Kind, Outcome
from penstock.reward.reward_models import sglang_classify, vllm_classify, vllm_score
from penstock.reward.transport import Reply, Request
from penstock.simulate.provider_server import ProviderServer


class Server:
    """Answers as vLLM (`data`, out of order) or SGLang (a list) does: a text's length, and its length halved."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer

    async def send(
        self, endpoint: Endpoint, request: Request, timeout_s: float, chunk: object
    ) -> tuple[Outcome, Reply | None]:
        self.asked.append((request.path, request.body))
        return Outcome(Kind.DONE), Reply(self._answer(request.body))

    async def close(self) -> None:
        return

    @property
    def pool(self) -> ComputePool:
        return ComputePool([Endpoint("local:rm")], transports={"local:rm": self})


def classes(body: dict[str, Any]) -> Any:
    entries = [
        {"index": n, "label": None, "probs": [len(text) * 1.0, len(text) / 2], "num_classes": 2}
        for n, text in enumerate(body["input"])
    ]
    return {"object": "list", "data": entries[::-1], "usage": {"prompt_tokens": 1}}


def pairs(body: dict[str, Any]) -> Any:
    numbers = [len(a) + 100.0 * len(b) for a, b in zip(body["text_1"], body["text_2"], strict=True)]
    return {"data": [{"index": n, "object": "score", "score": number} for n, number in enumerate(numbers)][::-1]}


def embedded(body: dict[str, Any]) -> Any:
    return [{"embedding": [len(text) * 1.0], "meta_info": {"prompt_tokens": 3}} for text in body["text"]]


async def together(reward: Any, *responses: str) -> list[Score | Unscored]:
    return await asyncio.gather(*(reward(build_sample(response)) for response in responses))


async def test_vllm_classify_sends_texts_together_and_gives_each_its_own_class() -> None:
    server = Server(classes)
    reward = vllm_classify(server.pool, "rm", text="{response}", label=1)
    assert await together(reward, "a", "bbbb") == [Score(0.5, {"raw": 0.5}), Score(2.0, {"raw": 2.0})]
    assert server.asked == [("/classify", {"model": "rm", "input": ["a", "bbbb"]})]


async def test_vllm_classify_gives_logits_where_they_are_asked_for() -> None:
    server = Server(classes)
    await together(vllm_classify(server.pool, "rm", label=0, logits=True, params={"truncate_prompt_tokens": 9}), "a")
    assert server.asked[0][1]["use_activation"] is False
    assert server.asked[0][1]["truncate_prompt_tokens"] == 9


async def test_vllm_score_sends_pairs() -> None:
    server = Server(pairs)
    reward = vllm_score(server.pool, "ce", text="{row.answer}", answer="{response}")
    assert [score.value for score in await together(reward, "a", "bb")] == [102.0, 202.0]  # type: ignore[union-attr]
    assert server.asked == [("/score", {"model": "ce", "text_1": ["42", "42"], "text_2": ["a", "bb"]})]


async def test_sglang_classify_reads_the_only_output() -> None:
    server = Server(embedded)
    reward = sglang_classify(server.pool, "rm", scale=2.0, offset=-1.0)
    assert await together(reward, "yes") == [Score(2.0 * 14 - 1, {"raw": 14.0})]
    assert server.asked == [("/classify", {"model": "rm", "text": ["what is it?yes"]})]


async def test_the_options_of_batching_change_what_goes_into_one_call() -> None:
    for options, calls in (({}, 1), ({"max_items": 2}, 2), ({"max_tokens": 1}, 4)):
        server = Server(embedded)
        await together(sglang_classify(server.pool, "rm", text="{response}", **options), *["four"] * 4)
        assert len(server.asked) == calls, options


async def test_a_text_may_be_made_by_a_function_or_from_the_row() -> None:
    server = Server(embedded)
    await together(sglang_classify(server.pool, "rm", text=lambda sample: f"<{sample.response}>"), "a")
    await together(
        sglang_classify(server.pool, "rm", text="Q: {prompt} A: {response} ({row.answer}) {other}"), "{prompt}"
    )
    assert [body["text"] for _, body in server.asked] == [["<a>"], ["Q: what is it? A: {prompt} (42) {other}"]]
    [missing] = await together(sglang_classify(server.pool, "rm", text="{row.none}"), "a")
    assert missing == Unscored("reward model: the sample has no row.none, which the text needs")


@pytest.mark.parametrize(
    ("make", "answer", "cause"),
    [
        (vllm_classify, lambda body: {"data": [{"index": 0, "score": 1.0}]}, "probs"),
        (vllm_classify, lambda body: {"data": [{"index": 1, "probs": [1.0]}]}, "1 entries"),
        (vllm_classify, lambda body: {"data": []}, "1 entries"),
        (vllm_classify, lambda body: {"data": [{"index": 0, "probs": [0.1, 0.9]}]}, "2 outputs; say with label="),
        (vllm_classify, lambda body: {"data": [{"index": 0, "probs": ["high"]}]}, "Expected `float`"),
        (vllm_score, lambda body: {"data": [{"index": 0, "score": None}]}, "Expected `float`"),
        (sglang_classify, lambda body: {"embedding": [1.0]}, "another shape"),
        (sglang_classify, lambda body: [{"embedding": []}], "0 outputs"),
        (sglang_classify, lambda body: [{"embedding": [1.0]}] * 2, "2 results"),
        (sglang_classify, lambda body: [{"embedding": [1e999]}], "not finite"),
    ],
)
async def test_an_answer_of_another_shape_is_unscored_with_its_cause(
    make: Callable[..., Any], answer: Callable[[dict[str, Any]], Any], cause: str
) -> None:
    [result] = await together(make(Server(answer).pool, "rm"), "a")
    assert isinstance(result, Unscored)
    assert cause in result.cause


def recorded(server: str, path: str, **asked: Any) -> list[dict[str, Any]]:
    """What a real server said (tests/engines/record_reward_models.py), where it was asked so."""
    lines = (Path(__file__).parent / "recorded" / "reward_models.jsonl").read_text().splitlines()
    exchanges = [json.loads(line) for line in lines]
    found = [e for e in exchanges if (e["server"], e["path"]) == (server, path) and asked.items() <= e["body"].items()]
    assert found, "nothing of this was recorded"
    return found


async def replayed(exchange: dict[str, Any], make: Callable[..., Any], responses: list[str], **options: Any) -> Any:
    """The rewards by what was recorded. The adapter has to ask in exactly the words that were answered."""
    server = Server(lambda body: exchange["answer"])
    results = await together(make(server.pool, exchange["body"]["model"], **options), *responses)
    assert server.asked == [(exchange["path"], exchange["body"])]
    return [result.value for result in results if isinstance(result, Score)]


@pytest.mark.parametrize("logits", [False, True])
async def test_what_vllm_says_of_classes_is_read(logits: bool) -> None:
    for exchange in recorded("vllm", "/classify"):
        if ("use_activation" in exchange["body"]) != logits:
            continue
        numbers = [entry["probs"] for entry in exchange["answer"]["data"]]
        for label in range(len(numbers[0])):
            chosen = {"label": label} if len(numbers[0]) > 1 else {}
            options = {"text": "{response}", "logits": logits, **chosen}
            values = await replayed(exchange, vllm_classify, exchange["body"]["input"], **options)
            assert values == [entry[label] for entry in numbers]


async def test_what_vllm_says_of_pairs_is_read() -> None:
    (exchange,) = [e for e in recorded("vllm", "/score") if e["status"] == 200]
    asked = dict(zip(exchange["body"]["text_2"], exchange["body"]["text_1"], strict=True))
    values = await replayed(exchange, vllm_score, list(asked), text=lambda sample: asked[sample.response])
    assert values == [entry["score"] for entry in exchange["answer"]["data"]]


async def test_what_sglang_says_of_classes_is_read() -> None:
    for exchange in recorded("sglang", "/classify"):
        numbers = [entry["embedding"] for entry in exchange["answer"]]
        for label in range(len(numbers[0])):
            chosen = {"label": label} if len(numbers[0]) > 1 else {}
            values = await replayed(exchange, sglang_classify, exchange["body"]["text"], text="{response}", **chosen)
            assert values == [entry[label] for entry in numbers]


async def test_what_vllm_says_of_an_order_comes_back_whole() -> None:
    (exchange,) = [e for e in recorded("vllm", "/rerank") if e["status"] == 200]
    server = Server(lambda body: exchange["answer"])
    assert await server.pool.rerank(**exchange["body"]) == exchange["answer"]
    assert server.asked == [("/rerank", exchange["body"])]


async def test_a_path_that_a_real_server_does_not_have_is_named() -> None:
    (exchange,) = [e for e in recorded("vllm", "/score") if e["status"] == 404]
    async with ProviderServer() as server:  # vLLM serves /score for models of one output alone
        async with ComputePool([Endpoint(server.url, models=("fault-404",))]) as pool:
            [result] = await together(vllm_score(pool, "fault-404"), "a")
    assert exchange["answer"] == {"detail": "Not Found"}
    assert isinstance(result, Unscored)
    assert "HTTP 404" in result.cause


async def test_a_label_that_is_not_there_is_unscored() -> None:
    [result] = await together(vllm_classify(Server(classes).pool, "rm", label=2), "a")
    assert isinstance(result, Unscored)
    assert "label = 2" in result.cause


async def test_a_run_names_a_reward_model_with_its_options(tmp_path: Path) -> None:
    async with ProviderServer() as server:
        (tmp_path / "pool.toml").write_text(f'[[endpoints]]\nurl = "{server.url}"\n')
        options = {"pool": str(tmp_path / "pool.toml"), "model": "ce", "scale": 2}
        reward = load_function("penstock.reward.reward_models:vllm_score", options)
        assert await reward.call(build_sample("four")) == Score(8.0, {"raw": 4.0})
        assert reward.is_async
        broken = load_function("penstock.reward.reward_models:vllm_score", {**options, "model": "fault-400"})
        result = await broken.call(build_sample("four"))
        assert isinstance(result, Unscored)
        assert "HTTP 400" in result.cause


def test_what_makes_no_sense_is_refused() -> None:
    for options in ({"scale": 0}, {"max_items": 0}, {"wait_ms": -1}, {"max_tokens": 0}):
        with pytest.raises(ConfigError):
            vllm_classify(Server(classes).pool, "rm", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no-such"):
        sglang_classify("no-such.toml", "rm")
