"""What an SGLang server behind an agent's engine does in a second, and what moving its samples costs.

    PYTHONPATH=tests/instance:tests/engines PENSTOCK_ENGINES=FOLDER python benchmarks/served_engines.py

FOLDER holds the environment that tests/engines/install-sglang.sh makes, as `sglang`. 64 samples in flight; in
mid-answer they are taken away and given back with what they have: to the server as it is, and after a swap to the same
weights, which empties its cache, so that it knows as little of them as another machine would.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from pathlib import Path

from builtin_models import Collected, staged, start, tiny_model
from engine_kinds import managed_server

from penstock.instance.dialects import dialect_of
from penstock.instance.served import ServedEngine
from penstock.wire import Sampling

IN_FLIGHT = 64
PROMPT_TOKENS = 32
CONTEXT = 512
ANSWER = Sampling(max_new_tokens=256)
MOVED_AT_TOKENS = 128
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
PROMPTS = [[(number * 31 + 7 * place) % 512 for place in range(PROMPT_TOKENS)] for number in range(IN_FLIGHT)]
LEASES = itertools.count(1)


async def main() -> None:
    model = tiny_model("llama", **SHAPE)
    with tempfile.TemporaryDirectory() as scratch:
        server = managed_server("sglang", Path(scratch))
        engine = ServedEngine(dialect_of("sglang"), server, max_running=IN_FLIGHT, max_context_tokens=CONTEXT)
        try:
            began = time.monotonic()
            await engine.update_weights(staged(model, 0))
            print(f"server up with weights after {time.monotonic() - began:.1f} s")
            engine.stop(list((await answers(engine, 8)).tokens))  # Warms up.
            for version, where in ((0, "the same server"), (1, "a server that knows nothing of them")):
                half = await answers(engine, MOVED_AT_TOKENS)
                engine.stop(list(half.tokens))
                if version:
                    began = time.monotonic()
                    await engine.update_weights(staged(model, version))
                    print(f"swap: {time.monotonic() - began:.3f} s")
                await moved(engine, half, where)
            for _ in range(3):
                began = time.monotonic()
                whole = await answers(engine, ANSWER.max_new_tokens)
                count = sum(map(len, whole.tokens.values()))
                print(f"{IN_FLIGHT} in flight: {count / (time.monotonic() - began):,.0f} tokens/s")
        finally:
            await engine.close()


async def moved(engine: ServedEngine, half: Collected, where: str) -> None:
    """Gives samples back with what they have; prints what is to be prefilled until each has its next token."""
    outputs = list(half.tokens.values())
    known = sum(len(prompt) + len(output) for prompt, output in zip(PROMPTS, outputs, strict=True))
    before, began = engine.load().tokens_prefilled, time.monotonic()
    went_on = await answers(engine, 1, outputs)
    took_s = time.monotonic() - began
    asked = engine.load().tokens_prefilled - before
    engine.stop(list(went_on.tokens))
    print(
        f"moved to {where}: {known} tokens of context, {asked} asked to be prefilled ({asked / known:.2f} of one "
        f"prefill each; what the server has cached it leaves out), all {IN_FLIGHT} went on after {took_s:.2f} s"
    )


async def answers(engine: ServedEngine, until_tokens: int, begun: list[list[int]] | None = None) -> Collected:
    """Every sample's answer, from what it had, until each has `until_tokens` more. A lease is given once."""
    starts = [
        start(next(LEASES), prompt, ANSWER, list(output))
        for prompt, output in zip(PROMPTS, begun or [[]] * IN_FLIGHT, strict=True)
    ]
    collected = Collected({item.lease: list(item.prefix_ids) for item in starts})
    wanted = {item.lease: len(item.prefix_ids) + until_tokens for item in starts}
    engine.start(starts)
    async for delta in engine.deltas():
        collected.add(delta)
        assert not collected.causes, collected.causes
        if all(len(collected.tokens[lease]) >= count for lease, count in wanted.items()):
            break
    return collected


if __name__ == "__main__":
    asyncio.run(main())
