"""Weights over a link of known rate: one instance, and one that generates; eight are in `weights_eight`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, at_least, at_most, skipped
from penstock.bench.weights_eight import eight_and_one
from penstock.bench.weights_encoding import beside_its_encoding
from penstock.bench.weights_link import (
    AHEAD_S,
    CHUNK_BYTES,
    PROXIES,
    ROUND_TRIP_S,
    THERE,
    TOKEN,
    DelayProxy,
    StoreProcess,
    TalkingProcess,
    files_of,
    shaped,
)
from penstock.errors import PenstockError
from penstock.instance.loading import WeightLoader

__all__ = ["over_shaped_links"]

PULLS = 5
TIMES = (2, 4)
MEMORY_COPIES = 5
"""Of a version: the store has two, the puller its base and what it stages, and somebody else lives here too."""
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def over_shaped_links(before: bytes, after: bytes, size: int) -> list[Result]:
    """`before` and `after` for one instance; the first `size` bytes of them for eight."""
    results = []
    for rate_mbit_s, bounds in ((1000.0, True), (100.0, False)):
        with contextlib.ExitStack() as parts:
            folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
            try:
                link = parts.enter_context(shaped(rate_mbit_s))
            except PenstockError as error:
                return [skipped("weights over a shaped link", "x", f"no shaped link here: {error}")]
            if bounds:
                pair = files_of(folder, "pair", before, after)
                one, raw_s = asyncio.run(_sooner(link.namespace, pair, len(after)))
                results += one + beside_its_encoding(link, rate_mbit_s, pair, raw_s)
                for count in TIMES:
                    results += repeated(folder, link.namespace, before, after, count)
                results += asyncio.run(_pause(folder, link.namespace))
            # On the slower link a quarter of the bytes take as long, and the processor has time.
            part = size if bounds else size // 4
            results += eight_and_one(folder, link, rate_mbit_s, before[:part], after[:part], bounds)
    return results


def repeated(folder: Path, namespace: str, before: bytes, after: bytes, count: int) -> list[Result]:
    """The pair so many times over, where there is memory for it: real models are larger."""
    size = count * len(after)
    if MEMORY_COPIES * size > usable_bytes():
        return [skipped(f"{_what(size)}, sooner than raw", "x", "not enough memory")]
    pair = files_of(folder, f"pair-{count}", before, after)
    for path, data in zip(pair, (before, after)):
        with path.open("ab") as file:
            for _ in range(count - 1):
                file.write(data)
    results, _ = asyncio.run(_sooner(namespace, pair, size))
    for path in pair:
        path.unlink()
    return results


def _what(size: int) -> str:
    return f"delta of the real pair, {size / 2**30:g} GiB"


async def _sooner(namespace: str, pair: list[Path], size: int) -> tuple[list[Result], float]:
    """An agent's loader, links and memory kept from version to version, as it goes on in a run. Also the seconds that
    the version takes raw. Between two pulls of the pair's second version the first one comes again, as a difference."""
    store = StoreProcess(pair, CHUNK_BYTES, namespace, THERE)
    whole, differences = (WeightLoader(TOKEN, codec=codec, connections=4) for codec in ("raw", "delta"))
    with contextlib.ExitStack() as parts:
        parts.callback(store.kill)
        # A process of its own: on a real link nobody shares the instance's interpreter.
        proxy = TalkingProcess(PROXIES, store.address, "1")
        parts.callback(proxy.kill)
        address = proxy.said()
        proxy.tell(str(ROUND_TRIP_S / 2))
        proxy.said()
        raw = [(await _timed(whole, address, 0))[0] for _ in range(2)]
        differences.serves(await whole.pull(address, 0, 300))
        # Encoded once, for whoever asks first; what an instance then waits for is the transfer.
        first_s, came = await _timed(differences, address, 1, ahead=False)
        took = []
        for _ in range(1 + PULLS):
            await _timed(differences, address, 0)
            took.append((await _timed(differences, address, 1))[0])
        await whole.close()
        await differences.close()
    raw_s, one_s = min(raw), statistics.median(took[1:])
    note = (
        f"{size / 2**20:.0f} MiB at 1 Gb/s (tc tbf) and {ROUND_TRIP_S * 1e3:.0f} ms there and back (userspace): raw "
        f"{raw_s:.2f} s, delta {one_s:.3f} s ({came / 1e6:.1f} MB, of which the link takes {came * 8 / 1e9:.3f} s), "
        f"with encoding {first_s:.3f} s; the pair is one of a small model, its tensors repeated"
    )
    return [
        at_least(f"{_what(size)}, sooner than raw", raw_s / one_s, 50, "x", note),
        Result(f"{_what(size)}, with the encoding", raw_s / first_s, "x"),
    ], raw_s


def usable_bytes() -> int:
    """Of memory, without pushing anybody else out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PenstockError("the system does not say how much memory can be used")


async def _timed(loader: WeightLoader, address: str, version: int, ahead: bool = True) -> tuple[float, int]:
    """The seconds that a pull takes, and the bytes; the version then serves, as long as a step takes.

    Without `ahead` nothing is waited for: the first version came by another loader, whose memory is not this one's.
    """
    began = time.perf_counter()
    staged = await loader.pull(address, version, 300)
    took_s, came = time.perf_counter() - began, staged.bytes_fetched
    loader.serves(staged)
    del staged
    if ahead:
        await loader.base_is_ahead(AHEAD_S)
    return took_s, came


async def _pause(folder: Path, namespace: str) -> list[Result]:
    """The built-in engine generates while the next version comes, and on through the swap."""
    from penstock.instance.builtin.engine import BuiltinEngine
    from penstock.instance.engine import SequenceStart
    from penstock.wire import Sampling

    versions = [_model(folder / f"model-{number}", number) for number in range(PULLS + 1)]
    store = StoreProcess(versions, CHUNK_BYTES, namespace, THERE)
    proxy = DelayProxy(store.address, ROUND_TRIP_S / 2)
    engine = BuiltinEngine(
        device="cpu",
        max_running=8,
        max_context_tokens=1024,
        # For eight sequences in float32, which weights in bfloat16 are served in where the processor knows no other.
        kv_cache_mib=128,
        threads=1,
        frame_steps=1,
    )
    loader = WeightLoader(TOKEN, codec="raw", connections=4)
    times: list[float] = []

    async def listen() -> None:
        lease = 0
        async for delta in engine.deltas():
            times.append(time.perf_counter())
            ended = sum(finish.name != "RUNNING" for finish in delta.finishes)
            for _ in range(ended):
                lease += 1
                engine.start([start(1000 + lease)])

    def start(lease: int) -> SequenceStart:
        return SequenceStart(
            lease=lease,
            seed=lease,
            prompt_ids=[1, 2, 3, 4],
            prefix_ids=[],
            sampling=Sampling(max_new_tokens=900),
        )

    transfers, pauses, sums, usual = [], [], [], []
    try:
        async with proxy.listening() as address:
            await engine.update_weights(await loader.pull(address, 0, 300))
            engine.start([start(lease) for lease in range(4)])
            listening = asyncio.create_task(listen())
            for version in range(1, PULLS + 1):
                begun = time.perf_counter()
                staged = await loader.pull(address, version, 300)
                there = time.perf_counter()
                await engine.update_weights(staged)
                swapped = time.perf_counter()
                await asyncio.sleep(0.3)
                transfers.append(there - begun)
                usual.append(statistics.median(_gaps(times, begun, there)))
                # The longest silence that has any part in the swap; one without a swap is a step long, too.
                about = _gaps(times, there, swapped + 0.3)
                pauses.append(max(about))
                sums.append(sum(max(0.0, gap - usual[-1]) for gap in about))
            listening.cancel()
            await loader.close()
    finally:
        await engine.close()
        store.kill()
    pause_s, transfer_s = statistics.median(pauses), statistics.median(transfers)
    note = (
        f"{statistics.median(transfers):.3f} s for a model of {MODEL['hidden_size']} by "
        f"{MODEL['num_hidden_layers']} layers, raw at 1 Gb/s; longest silence about a swap {pause_s * 1e3:.1f} ms, "
        f"of which a decode step is {statistics.median(usual) * 1e3:.1f} ms"
    )
    lost = (
        f"from the transfer to 0.3 s after the swap, less a decode step each; longest of all {max(pauses) * 1e3:.1f} ms"
    )
    return [
        at_most("pause of generation at a swap / the transfer", 100 * pause_s / transfer_s, 5.0, "%", note),
        Result("silence added by a swap, all in all", 1e3 * statistics.median(sums), "ms", note=lost),
    ]


def _gaps(times: list[float], begin: float, end: float) -> list[float]:
    """Between deltas, those that reach into begin..end."""
    pairs = [(one, other) for one, other in itertools.pairwise(times) if other >= begin and one <= end]
    return [other - one for one, other in pairs] or [end - begin]


def _model(folder: Path, seed: int) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model("qwen2", **MODEL, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
