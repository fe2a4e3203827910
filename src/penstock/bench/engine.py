"""How fast the built-in engine decodes, against transformers' `generate` and vLLM's CPU build, in one run.

256 prompts of 16 to 64 tokens, outputs of ragged length, temperature 1, 64 in flight, end-of-sequence ignored: every
engine makes the same number of tokens for the same prompts with the same random 1.3 M-parameter Qwen2. Repetitions
alternate between the engines and medians are reported. `generate` takes the prompts 64 at a time in the given order,
as a user would, and each of its batches lasts as long as its longest output.

vLLM is driven over HTTP on the loopback, as an agent drives it, and is not asked for log-probabilities, which ours
always gives. Its interpreter is taken from the environment variable PENSTOCK_VLLM_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.common import Result, at_least, at_most, median, skipped, usable_cores
from penstock.errors import EngineError, MissingExtra

DESCRIPTION = "tokens/s of the built-in engine, against transformers' generate and vLLM's CPU build"

IN_FLIGHT = 64
PROMPTS = 256
CONTEXT_TOKENS = 512
KV_CACHE_MIB = 64
VLLM_START_DEADLINE_S = 180.0
VLLM_REQUEST_DEADLINE_S = 300.0

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


@dataclass(frozen=True, slots=True)
class Job:
    prompt_ids: list[int]
    new_tokens: int


def make_jobs(quick: bool) -> list[Job]:
    """The same prompts and output lengths in every run; a quick one has outputs a quarter as long, and no float32."""
    rng = random.Random(7)
    shortest, longest = (8, 96) if quick else (16, 384)
    vocab = CONFIG["vocab_size"]
    return [
        Job([rng.randrange(8, vocab) for _ in range(rng.randint(16, 64))], rng.randint(shortest, longest))
        for _ in range(PROMPTS)
    ]


def run(quick: bool) -> list[Result]:
    """Raises MissingExtra without PyTorch and transformers; vLLM is skipped where it isn't set up."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "the benchmark of the engine") from error
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(usable_cores())
    jobs = make_jobs(quick)
    repetitions = 1 if quick else 3
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as temporary:
        folder = Path(temporary)
        parameters = save_model(folder)
        rates = _in_process(folder, jobs, repetitions, ("bfloat16",) if quick else ("float32", "bfloat16"))
        results = _results(rates, parameters)
        results += _against_vllm(folder, jobs, repetitions)
    return results


def save_model(folder: Path) -> int:
    """Writes the random model as a Hugging Face folder in float32; returns its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **CONFIG, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(slots=True)
class _Rates:
    """Tokens/s of each repetition, by engine and dtype, and the largest KV cache."""

    ours: dict[str, list[float]]
    theirs: dict[str, list[float]]
    kv_mib: float
    running: int


def _in_process(folder: Path, jobs: list[Job], repetitions: int, dtypes: tuple[str, ...]) -> _Rates:
    rates = _Rates({dtype: [] for dtype in dtypes}, {dtype: [] for dtype in dtypes}, 0.0, 0)
    warm = [Job(job.prompt_ids, 4) for job in jobs[:IN_FLIGHT]]
    for dtype in dtypes:
        asyncio.run(_ours(folder, dtype, warm))
        model = _load_transformers(folder, dtype)
        _generate(model, warm)
        for _ in range(repetitions):
            rate, kv_mib, running = asyncio.run(_ours(folder, dtype, jobs))
            rates.ours[dtype].append(rate)
            rates.kv_mib, rates.running = max(rates.kv_mib, kv_mib), running
            rates.theirs[dtype].append(_generate(model, jobs))
    return rates


async def _ours(folder: Path, dtype: str, jobs: list[Job]) -> tuple[float, float, int]:
    """Tokens/s through the `Engine` protocol, the KV cache's MiB, and how many sequences fit it."""
    from penstock.instance.builtin.checkpoint import stage_folder
    from penstock.instance.builtin.engine import BuiltinEngine
    from penstock.instance.engine import SequenceStart
    from penstock.sample import Finish
    from penstock.wire import Sampling

    engine = BuiltinEngine(
        device="cpu",
        dtype=dtype,
        max_running=IN_FLIGHT,
        max_context_tokens=CONTEXT_TOKENS,
        kv_cache_mib=KV_CACHE_MIB,
        threads=usable_cores(),
    )
    try:
        await engine.update_weights(stage_folder(folder, version=0))
        starts = [
            SequenceStart(
                lease=index,
                seed=index,
                prompt_ids=job.prompt_ids,
                prefix_ids=[],
                sampling=Sampling(max_new_tokens=job.new_tokens),
            )
            for index, job in enumerate(jobs)
        ]
        began = time.perf_counter()
        engine.start(starts)
        tokens, left = 0, len(jobs)
        async for delta in engine.deltas():
            tokens += len(delta.token_ids)
            left -= sum(finish is not Finish.RUNNING for finish in delta.finishes)
            if delta.causes:
                raise EngineError(f"the benchmark's sequences failed: {delta.causes}")
            if not left:
                break
        took = time.perf_counter() - began
        _check_tokens("the built-in engine", tokens, jobs)
        return tokens / took, engine.kv_cache_bytes / 2**20, engine.info.max_running
    finally:
        await engine.close()


def _load_transformers(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _generate(model: Any, jobs: list[Job]) -> float:
    """Wanted tokens/s of transformers' `generate`, 64 prompts at a time, left-padded."""
    import torch

    began = time.perf_counter()
    for at in range(0, len(jobs), IN_FLIGHT):
        batch = jobs[at : at + IN_FLIGHT]
        width = max(len(job.prompt_ids) for job in batch)
        padded = torch.tensor([[0] * (width - len(job.prompt_ids)) + job.prompt_ids for job in batch])
        mask = torch.tensor([[0] * (width - len(job.prompt_ids)) + [1] * len(job.prompt_ids) for job in batch])
        longest = max(job.new_tokens for job in batch)
        with torch.inference_mode():
            output = model.generate(
                padded, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
            )
        if output.shape[1] != width + longest:
            raise EngineError(f"transformers generated {output.shape[1] - width} tokens and not {longest}")
    return sum(job.new_tokens for job in jobs) / (time.perf_counter() - began)


def _results(rates: _Rates, parameters: int) -> list[Result]:
    results = []
    for dtype, ours in rates.ours.items():
        mine, theirs = median(ours), median(rates.theirs[dtype])
        results.append(Result(f"built-in, {dtype}", mine, "tokens/s", note=f"{parameters:,} parameters, Qwen2"))
        results.append(Result(f"transformers, {dtype}", theirs, "tokens/s"))
        results.append(at_least(f"built-in / transformers, {dtype}", mine / theirs, 1.5, "x"))
    note = f"{rates.running} sequences of {CONTEXT_TOKENS} tokens"
    return [*results, at_most("KV cache", rates.kv_mib, KV_CACHE_MIB, "MiB", note=note)]


# ---- vLLM


def _against_vllm(folder: Path, jobs: list[Job], repetitions: int) -> list[Result]:
    what, target = "built-in / vLLM, bfloat16", ">= 0.9"
    python = os.environ.get("PENSTOCK_VLLM_PYTHON", "")
    if not python:
        return [skipped(what, "x", "PENSTOCK_VLLM_PYTHON does not name the interpreter of a vLLM set-up", target)]
    if not Path(python).is_file():
        return [skipped(what, "x", f"PENSTOCK_VLLM_PYTHON={python} is not there", target)]
    ours: list[float] = []
    theirs: list[float] = []
    with _vllm_server(python, folder) as url:
        asyncio.run(_drive_vllm(url, [Job(job.prompt_ids, 4) for job in jobs[:IN_FLIGHT]]))
        for _ in range(repetitions):
            theirs.append(asyncio.run(_drive_vllm(url, jobs)))
            ours.append(asyncio.run(_ours(folder, "bfloat16", jobs))[0])
    return [
        Result("vLLM, bfloat16", median(theirs), "tokens/s", note="over loopback HTTP, without log-probabilities"),
        at_least(what, median(ours) / median(theirs), 0.9, "x"),
    ]


@contextmanager
def _vllm_server(python: str, folder: Path) -> Iterator[str]:
    """A vLLM server on a free port with the model of `folder`; ended, with its children, on leaving."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{usable_cores() - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [str(Path(python).parent / "vllm"), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(IN_FLIGHT)]
    command += ["--enforce-eager", "--enable-scale-out", "--skip-tokenizer-init", "--no-enable-prefix-caching"]
    log_path = folder / "vllm.log"
    with open(log_path, "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_until_healthy(url, server, log_path))
        yield url
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """Ends the server's whole process group: asked first, then killed."""
    import signal

    for ask in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, ask)
        except ProcessLookupError:
            break
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            continue
    server.wait(timeout=10)


async def _until_healthy(url: str, server: subprocess.Popen[bytes], log_path: Path) -> None:
    import aiohttp

    deadline = time.monotonic() + VLLM_START_DEADLINE_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                raise EngineError(f"vLLM ended with exit code {server.returncode} while starting:\n{_tail(log_path)}")
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass  # not listening yet; the deadline bounds the wait
            await asyncio.sleep(0.25)
    raise EngineError(f"vLLM was not healthy within {VLLM_START_DEADLINE_S:.0f} s")


def _tail(log_path: Path) -> str:
    return log_path.read_text(errors="replace")[-2000:]


async def _drive_vllm(url: str, jobs: list[Job]) -> float:
    """Tokens/s of the server with 64 requests in flight."""
    import aiohttp

    waiting = iter(jobs)
    tokens = 0

    async def worker(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        for job in waiting:
            sampling = {"max_tokens": job.new_tokens, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
            body = {"token_ids": job.prompt_ids, "sampling_params": sampling, "stream": False}
            async with session.post(f"{url}/inference/v1/generate", json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise EngineError(f"vLLM answered {answer.status}: {text[:500]}")
            tokens += len(json.loads(text)["choices"][0]["token_ids"])

    timeout = aiohttp.ClientTimeout(total=VLLM_REQUEST_DEADLINE_S)
    began = time.perf_counter()
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=IN_FLIGHT)) as session:
        async with asyncio.TaskGroup() as workers:
            for _ in range(IN_FLIGHT):
                workers.create_task(worker(session))
    took = time.perf_counter() - began
    _check_tokens("vLLM", tokens, jobs)
    return tokens / took


def _check_tokens(who: str, tokens: int, jobs: list[Job]) -> None:
    wanted = sum(job.new_tokens for job in jobs)
    if tokens != wanted:
        raise EngineError(f"{who} generated {tokens} tokens and not {wanted}; the comparison would be unfair")
