"""What a preempted machine costs on each engine: built-in, vLLM and SGLang, end to end and by the same yardstick.

Two machines, each an agent beside its engine, share a batch of which every sample runs; one machine gets SIGKILL. The
surviving engine's own count says what it prefilled for the samples that it took over, the manager's events what they
had. The real servers are those of the environments below PENSTOCK_ENGINES (`make test-engines` makes them).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from penstock.bench.common import Result, at_most, skipped
from penstock.bench.house import House, open_house
from penstock.errors import EngineError
from penstock.instance.http_calls import call, call_text, metrics_in
from penstock.observe.events import InstanceChanged, SamplesMoved
from penstock.sample import Prompt
from penstock.wire import Sampling

DESCRIPTION = "the part of migration that needs engine servers: a preempted machine's cost on built-in, vLLM and SGLang"

SAMPLES = 32
PROMPT_TOKENS = 48
ANSWER = Sampling(max_new_tokens=440)
KILL_AT_TOKENS = 64
"""Of each sample on average."""
CONTEXT = 512
VOCAB = 512
FRAME_STEPS = 8
START_S = 600.0
BATCH_S = 240.0
POLL_S = 0.02
HEARTBEAT_S = 1.0
KILL_WITHIN_S = 0.2
WARM_UP = Sampling(max_new_tokens=16)
TARGET = "<= 1"

Count = Callable[[House, aiohttp.ClientSession, str], Awaitable[float]]
"""A figure of the engine called by the name."""


@dataclass(frozen=True)
class Kind:
    """How an engine of this kind is started for the benchmark, and what it says of its work."""

    prefilled: Count
    """Prompt tokens computed so far; what its prefix cache saved is not among them."""
    drawn: Count
    """Output tokens so far, those that its agent has not read among them."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Cost:
    """One preemption."""

    samples_moved: int
    context_moved: int
    """Tokens that the moved samples had, prompts included: one prefill for each."""
    prefilled: float
    drawn_twice: float
    next_token_s: float | None
    """Until the survivor had prefilled them all; None where nothing says so in time."""
    lost: int
    """Samples that did not come, or not whole."""


async def beat_prefilled(house: House, http: aiohttp.ClientSession, name: str) -> float:
    """By the agent's heartbeat."""
    await asyncio.sleep(2 * HEARTBEAT_S)
    async with http.get(f"{house.url}/instances", headers={"Authorization": f"Bearer {house.token}"}) as answer:
        rows = await answer.json()
    return float(next(row["load"]["tokens_prefilled"] for row in rows if row["name"] == name and row.get("load")))


async def progress_drawn(house: House, http: aiohttp.ClientSession, name: str) -> float:
    """What reached the agent; exact even after SIGKILL."""
    return float(reached_agent(house, name))


async def vllm_prefilled(house: House, http: aiohttp.ClientSession, name: str) -> float:
    page = await call_text(http, f"{server_of(house, name)}/metrics")
    every, cached = metrics_in(page, ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total"))
    return every - cached


async def vllm_drawn(house: House, http: aiohttp.ClientSession, name: str) -> float:
    page = await call_text(http, f"{server_of(house, name)}/metrics")
    return metrics_in(page, ("vllm:generation_tokens_total",))[0]


async def sglang_prefilled(house: House, http: aiohttp.ClientSession, name: str) -> float:
    said = await call(http, "GET", f"{server_of(house, name)}/v1/loads?include=core")
    return float(sum(load["total_prefill_uncached_tokens"] for load in said["loads"]))


async def sglang_drawn(house: House, http: aiohttp.ClientSession, name: str) -> float:
    """By its KV cache, which holds all tokens of what runs but the last drawn: it counts output when a request ends."""
    said = await call(http, "GET", f"{server_of(house, name)}/v1/loads?include=core")
    return float(
        sum(load["num_used_tokens"] - load["num_running_reqs"] * (PROMPT_TOKENS - 1) for load in said["loads"])
    )


KINDS: Mapping[str, Kind] = {
    "builtin": Kind(beat_prefilled, progress_drawn),
    "vllm": Kind(vllm_prefilled, vllm_drawn, {"enforce-eager": True}),
    # Its load is written anew after every step, and not after fifteen.
    "sglang": Kind(sglang_prefilled, sglang_drawn, {"load-snapshot-publish-interval": 1}),
}


def run(quick: bool) -> list[Result]:
    results: list[Result] = []
    for kind in KINDS:
        if why := missing(kind, quick):
            results.append(skipped(f"{kind}: prefilled again / one prefill of each sample moved", "ratio", why, TARGET))
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-preempted-") as folder, on_path(kind):
            results += rows(kind, asyncio.run(preempt(kind, Path(folder))))
    return results


def missing(kind: str, quick: bool) -> str:
    """Why this kind is not measured here; empty where it is."""
    if kind == "builtin":
        return ""
    if quick:
        return "not in a quick run: two servers take a minute to start"
    if not os.environ.get("PENSTOCK_ENGINES"):
        return "no environment: PENSTOCK_ENGINES names the folder of those that `make test-engines` makes"
    program = environment_of(kind) / "bin" / kind
    return "" if program.exists() else f"there is no {program}"


def environment_of(kind: str) -> Path:
    return Path(os.environ["PENSTOCK_ENGINES"]).absolute() / kind


@contextlib.contextmanager
def on_path(kind: str) -> Iterator[None]:
    """The kind's environment before all others, for the processes that are started meanwhile."""
    before = os.environ["PATH"]
    if kind != "builtin":
        os.environ["PATH"] = f"{environment_of(kind) / 'bin'}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def rows(kind: str, cost: Cost) -> list[Result]:
    found = [
        at_most(f"{kind}: samples lost", cost.lost, 0, "samples"),
        Result(f"{kind}: samples moved", cost.samples_moved, "samples"),
        at_most(
            f"{kind}: prefilled again / one prefill of each sample moved",
            cost.prefilled / max(1, cost.context_moved),
            1.0,
            "ratio",
            note=f"{cost.prefilled:,.0f} tokens computed for samples that had {cost.context_moved:,}",
        ),
        at_most(
            f"{kind}: tokens drawn twice, for each sample moved",
            cost.drawn_twice / max(1, cost.samples_moved),
            FRAME_STEPS,
            "tokens",
            note=f"a frame is {FRAME_STEPS} tokens of each",
        ),
    ]
    if cost.next_token_s is not None:
        found.append(Result(f"{kind}: every moved sample has its next token after", cost.next_token_s, "s"))
    return found


async def preempt(kind: str, folder: Path) -> Cost:
    """One batch, all of it running on two machines, and the SIGKILL of one."""
    engine: dict[str, Any] = {"kind": kind, "options": dict(KINDS[kind].options), "frame_steps": FRAME_STEPS}
    engine |= {"max_running": SAMPLES, "max_context_tokens": CONTEXT}
    rollout = {"heartbeat_s": HEARTBEAT_S, "load_deadline_s": START_S}
    async with (
        aiohttp.ClientSession() as http,
        open_house(folder, engines=2, rollout=rollout, **engine) as house,
    ):
        await house.publish(0, model())
        await house.until(lambda: ready(house) == 2, "two engines", START_S)
        await house.finish("warm-up", await house.submit("warm-up", asked(SAMPLES), 1, WARM_UP), BATCH_S)
        return await _preempt(house, http, kind)


async def _preempt(house: House, http: aiohttp.ClientSession, kind: str) -> Cost:
    victim, survivor, count = "engine-0", "engine-1", KINDS[kind]
    engines = house.processes.engines
    reached = {name: reached_agent(house, name) for name in engines}
    drawn_before = await count.drawn(house, http, victim)
    prefilled_before = await count.prefilled(house, http, survivor)
    collected = await house.submit("preempted", asked(SAMPLES, apart=1), 1, ANSWER)
    begun = reached[victim] + SAMPLES // len(engines) * KILL_AT_TOKENS
    await house.until(lambda: reached_agent(house, victim) > begun, f"{victim} to be in mid-answer", BATCH_S)
    # Chunks of all samples come in step, and what was waited for is one: a machine is lost at any moment.
    await asyncio.sleep(random.uniform(0.0, KILL_WITHIN_S))
    moved_before = len(house.events_of(SamplesMoved))
    drawn = await count.drawn(house, http, victim) - drawn_before
    killed_at = time.monotonic()
    house.processes.kill_engine(victim, "the benchmark")
    await house.until(lambda: len(house.events_of(SamplesMoved)) > moved_before, "the samples to move")
    moved = house.events_of(SamplesMoved)[moved_before:]
    samples = sum(event.samples for event in moved)
    context = sum(event.tokens_kept for event in moved) + samples * PROMPT_TOKENS
    own = (SAMPLES - samples) * PROMPT_TOKENS
    next_token_s = None
    if kind != "builtin":  # Whose count comes with a heartbeat, too late to tell.
        while await count.prefilled(house, http, survivor) < prefilled_before + own + context:
            if collected.ended.is_set():
                break
            await asyncio.sleep(POLL_S)
        else:
            next_token_s = time.monotonic() - killed_at
    finished = await house.finish("preempted", collected, BATCH_S)
    gone = [event for event in house.events_of(InstanceChanged) if event.after == "gone" and event.name == victim]
    accepted = sum(event.tokens_accepted for event in gone) - reached[victim]
    return Cost(
        samples_moved=samples,
        context_moved=context,
        prefilled=await count.prefilled(house, http, survivor) - prefilled_before - own,
        # Neither knows all: the server's count ends before the kill, and the agent's holds what reached the agent.
        drawn_twice=max(drawn, reached_agent(house, victim) - reached[victim]) - accepted,
        next_token_s=next_token_s,
        lost=SAMPLES - sum(len(sample.token_ids) == ANSWER.max_new_tokens for sample in finished.values()),
    )


def reached_agent(house: House, name: str) -> int:
    """Output tokens, exact even after SIGKILL."""
    return house.processes.engines[name].tokens_generated() or 0


def ready(house: House) -> int:
    return sum(row.state == "ready" for row in house.status[-1].instances) if house.status else 0


def server_of(house: House, name: str) -> str:
    """The address of the server that this engine's agent started, by its log. Raises EngineError."""
    said = house.processes.engines[name].log_path.read_text()
    found = re.findall(r"at (http://[\w.]+:\d+) serves weight version", said)
    if not found:
        raise EngineError(f"the agent of {name} does not say where its server is: {said[-500:]}")
    return str(found[-1])


def asked(count: int, apart: int = 0) -> list[Prompt]:
    """Prompts that share no beginning, so that no cache knows one by another; `apart` makes others."""
    made = []
    for index in range(count):
        ids = [(index * 31 + 7 * place + 211 * apart) % VOCAB for place in range(PROMPT_TOKENS)]
        made.append(Prompt(index=index, text="", token_ids=ids, row={}, source=f"made[{index}]"))
    return made


def model() -> Any:
    """A random Llama in float32, of sizes that both servers' CPU kernels take."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
