"""What every engine behind a server must do, against the real servers: each answer is held against transformers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import torch
from builtin_models import Collected, fresh_logprobs, staged, start, tiny_model
from engine_kinds import CONTEXT, KINDS, installed, managed_engine

from penstock.errors import EngineError
from penstock.instance.dialects import dialect_of
from penstock.instance.served import ServedEngine
from penstock.instance.supervise import AdoptedServer
from penstock.sample import Finish
from penstock.wire import Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

WITHIN_S = 400.0
# Vocabulary and heads of sizes that the servers' CPU kernels take.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": CONTEXT,
}
GREEDY = Sampling(max_new_tokens=40, temperature=0.0)
PROMPTS = {lease: [(7 * lease + place) % 64 for place in range(3 + lease % 5)] for lease in range(12)}


class Subject:
    """One kind's engine over a real server, and the models whose weights it is given."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.engine = managed_engine(kind, folder)
        self.models = {n: tiny_model("llama", n, tie_word_embeddings=True, **SHAPE) for n in (0, 1)}
        self.version = -1

    @property
    def model(self) -> Any:
        return self.models[self.version % 2]

    async def next_version(self) -> None:
        self.version += 1
        await self.engine.update_weights(staged(self.model, self.version))

    async def run(self, prompts: dict[int, list[int]], sampling: Sampling, **options: Any) -> Collected:
        prefix = options.get("prefix") or []
        collected = Collected({lease: list(prefix) for lease in prompts})
        self.engine.start([start(lease, prompt, sampling, **options) for lease, prompt in prompts.items()])
        await collect(self.engine, collected, set(prompts))
        return collected


async def collect(engine: ServedEngine, collected: Collected, leases: set[int]) -> None:
    async with asyncio.timeout(WITHIN_S):
        async for delta in engine.deltas():
            collected.add(delta)
            if all(collected.finishes.get(lease) for lease in leases):
                return


def check(model: Any, prompts: dict[int, list[int]], collected: Collected, drawn_from: int = 0) -> None:
    """Every reported log-probability is the model's own."""
    for lease, prompt in prompts.items():
        fresh = fresh_logprobs(model, prompt, collected.tokens[lease])[drawn_from:]
        assert torch.allclose(torch.tensor(collected.logprobs[lease]), fresh, atol=2e-3), lease


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=installed())
async def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Subject]:
    made = Subject(request.param, tmp_path_factory.mktemp("engine"))
    try:
        await made.next_version()
        yield made
    finally:
        await made.engine.close()


async def test_greedy_answers_and_their_logprobs_are_those_of_a_forward_pass(subject: Subject) -> None:
    collected = await subject.run(PROMPTS, GREEDY)
    check(subject.model, PROMPTS, collected)
    for lease, prompt in PROMPTS.items():
        assert collected.tokens[lease] == greedy(subject.model, prompt, 40)
    info, load = subject.engine.info, subject.engine.load()
    assert (info.kind, info.vocab_size, info.max_context_tokens, info.max_running) == (subject.kind, 64, CONTEXT, 8)
    assert (load.running, load.waiting) == (0, 0)


async def test_what_a_server_prefills_is_seen_in_its_figures(subject: Subject) -> None:
    dialect, prompt = dialect_of(subject.kind), [(11 * place + 5) % 64 for place in range(500)]
    async with aiohttp.ClientSession() as http:
        before = await dialect.figures(http, subject.engine._server.base_url)
        await subject.run({1: prompt}, Sampling(max_new_tokens=1))
        after = await dialect.figures(http, subject.engine._server.base_url)
    assert len(before) == len(after)
    assert max(late - early for early, late in zip(before, after, strict=True)) >= len(prompt) - 16, (before, after)


async def test_many_long_prefixes_at_once_are_taken(subject: Subject) -> None:
    # As after the loss of a machine: more tokens than a server prefills in one step.
    prompts = {40 + n: [(13 * place + 7 * n) % 64 for place in range(900)] for n in range(8)}
    collected = await subject.run(prompts, Sampling(max_new_tokens=3))
    assert set(collected.finishes.values()) == {Finish.LENGTH}, collected.causes
    check(subject.model, prompts, collected)


# These two come before any swap: what an adopted server holds is read from the folder that it was started on.


async def test_a_server_of_another_model_is_refused(subject: Subject) -> None:
    other = tiny_model("llama", 0, tie_word_embeddings=True, **(SHAPE | {"vocab_size": 96}))
    engine = adopting(subject)
    with pytest.raises(EngineError, match=r"vocab_size=64, and the run's model has vocab_size=96"):
        await engine.update_weights(staged(other))
    await engine.close()
    with pytest.raises(EngineError, match="is of another model"):
        await subject.engine.update_weights(staged(other, subject.version + 1))


async def test_weights_that_make_no_sense_are_found_out(subject: Subject) -> None:
    broken = tiny_model("llama", 0, tie_word_embeddings=True, **SHAPE)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    engine = adopting(subject)
    await engine.update_weights(staged(broken, 1_000))
    engine.start([start(1, PROMPTS[1], GREEDY)])
    with pytest.raises(EngineError, match=r"log-probability nan|outside the vocabulary"):
        await collect(engine, Collected(), {1})
    await engine.close()
    await subject.next_version()
    check(subject.model, PROMPTS, await subject.run(PROMPTS, GREEDY))


async def test_logprobs_are_of_the_model_whatever_the_sampling(subject: Subject) -> None:
    sampling = Sampling(max_new_tokens=30, temperature=0.6, top_p=0.8, top_k=20)
    check(subject.model, PROMPTS, await subject.run(PROMPTS, sampling))


async def test_an_answer_goes_on_from_a_prefix_exactly_as_it_would_have(subject: Subject) -> None:
    whole = await subject.run(PROMPTS, GREEDY)
    for lease, prompt in PROMPTS.items():
        prefix = whole.tokens[lease][:17]
        rest = await subject.run({lease: prompt}, GREEDY, prefix=prefix)
        assert rest.tokens[lease] == whole.tokens[lease]
        check(subject.model, {lease: prompt}, rest, drawn_from=17)
        if lease == 3:
            break


async def test_the_same_seed_draws_the_same_tokens(subject: Subject) -> None:
    if not KINDS[subject.kind].seeds:
        pytest.skip(f"{subject.kind} draws by seeds on accelerators only")
    sampling = Sampling(max_new_tokens=30)
    drawn = [(await subject.run({1: PROMPTS[1]}, sampling, seed=seed)).tokens[1] for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


async def test_answers_end_at_a_stop_id_at_their_limit_or_at_the_context(subject: Subject) -> None:
    whole = greedy(subject.model, PROMPTS[2], 40)
    stop = whole[9]
    sampling = Sampling(max_new_tokens=40, temperature=0.0, stop_ids=(stop, 63))
    stopped = await subject.run({2: PROMPTS[2]}, sampling)
    assert stopped.tokens[2] == whole[: whole.index(stop) + 1]
    assert stopped.finishes[2] is Finish.STOP
    short = await subject.run({2: PROMPTS[2]}, Sampling(max_new_tokens=7, temperature=0.0))
    assert (short.tokens[2], short.finishes[2]) == (whole[:7], Finish.LENGTH)
    long = await subject.run({2: PROMPTS[2]}, Sampling(max_new_tokens=10_000))
    assert (len(long.tokens[2]), long.finishes[2]) == (CONTEXT - len(PROMPTS[2]), Finish.LENGTH)


async def test_a_sequence_that_is_stopped_is_stopped_in_the_server_too(subject: Subject) -> None:
    before = subject.engine.load().tokens_generated
    sampling = Sampling(max_new_tokens=200)
    subject.engine.start([start(lease, prompt, sampling) for lease, prompt in PROMPTS.items()])
    async with asyncio.timeout(WITHIN_S):
        async for delta in subject.engine.deltas():
            if delta.token_ids:
                break
        subject.engine.stop(list(PROMPTS))
        while await running(subject) > 0:
            await asyncio.sleep(0.05)
    assert subject.engine.load().tokens_generated - before < 200 * len(PROMPTS)
    assert (subject.engine.load().running, subject.engine.load().waiting) == (0, 0)


async def test_new_weights_answer_in_the_middle_of_a_sequence(subject: Subject) -> None:
    # On a busy machine a server may hand out whole answers before anybody hears of them.
    for attempt in range(1, 9):
        if await straddling_a_swap(subject, 100 * attempt):
            return
    pytest.fail("no swap found a sequence under way")


async def straddling_a_swap(subject: Subject, first_lease: int) -> int:
    """How many sequences were drawn with two versions; every token's log-probability is checked against its own."""
    prompts = {first_lease + lease: prompt for lease, prompt in PROMPTS.items()}
    old_model, old = subject.model, subject.version
    collected = Collected()
    count = 900
    sampling = Sampling(max_new_tokens=count)
    subject.engine.start([start(lease, prompt, sampling) for lease, prompt in prompts.items()])
    reader = asyncio.create_task(collect(subject.engine, collected, set(prompts)))
    async with asyncio.timeout(WITHIN_S):
        while not any(collected.tokens.values()):
            await asyncio.sleep(0.001)
    await subject.next_version()
    await reader
    assert subject.engine.version == old + 1
    straddling = 0
    for lease, prompt in prompts.items():
        versions = collected.versions[lease]
        cut = versions.count(old)
        assert versions == [old] * cut + [old + 1] * (count - cut)
        straddling += 0 < cut < count
        said = torch.tensor(collected.logprobs[lease])
        tokens = collected.tokens[lease]
        assert torch.allclose(said[:cut], fresh_logprobs(old_model, prompt, tokens)[:cut], atol=2e-3)
        assert torch.allclose(said[cut:], fresh_logprobs(subject.model, prompt, tokens)[cut:], atol=2e-3)
    return straddling


async def test_nothing_cached_under_old_weights_is_reused(subject: Subject) -> None:
    prompt = {500: [(5 * place + 3) % 64 for place in range(128)]}  # Long enough for every server's cache blocks.
    for _ in range(3):
        collected = await subject.run(prompt, GREEDY)
        assert collected.tokens[500] == greedy(subject.model, prompt[500], 40)
        check(subject.model, prompt, collected)
        await subject.next_version()


async def test_a_server_that_is_killed_is_noticed_at_once_with_every_token_so_far(subject: Subject) -> None:
    subject.engine.start([start(900, PROMPTS[1], Sampling(max_new_tokens=200))])
    collected = Collected()
    pid = subject.engine._server._process.pid  # type: ignore[attr-defined]

    async def read_and_kill() -> None:
        async for delta in subject.engine.deltas():
            collected.add(delta)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(EngineError, match=r"server died|is gone"):
            await read_and_kill()
    fresh = fresh_logprobs(subject.model, PROMPTS[1], collected.tokens[900])
    assert torch.allclose(torch.tensor(collected.logprobs[900]), fresh, atol=2e-3)


def adopting(subject: Subject) -> ServedEngine:
    """Another engine over the subject's server."""
    dialect = dialect_of(subject.kind)
    url = subject.engine._server.base_url
    return ServedEngine(dialect, AdoptedServer(dialect, url), max_running=8, max_context_tokens=CONTEXT)


async def running(subject: Subject) -> float:
    url = subject.engine._server.base_url
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    values = re.findall(rf"^{re.escape(KINDS[subject.kind].running_metric)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert values, "the server does not say how many requests run"
    return sum(map(float, values))
