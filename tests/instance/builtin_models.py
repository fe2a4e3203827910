"""Tiny random models for the built-in engine's tests, made by transformers and handed over as the trainer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.instance.builtin.checkpoint import DTYPES
from penstock.instance.builtin.core import BuiltinCore, CoreOptions
from penstock.instance.engine import SequenceStart
from penstock.sample import Finish
from penstock.weights.manifest import Manifest, StagedWeights, TensorEntry
from penstock.wire import Sampling

# Tiny operations gain nothing from threads, and lose much where cores are shared.
torch.set_num_threads(1)

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]

VOCAB = 101

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(model_type: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(COMMON | options))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # made as ones and zeros, which would hide a mistake
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def staged(model: Any, version: int = 0) -> StagedWeights:
    """A weight version as the puller hands it over: raw bytes and a manifest."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, raw = [], {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        raw[name] = memoryview(data)
        entries.append(
            TensorEntry(
                name=name,
                dtype=names[tensor.dtype],
                shape=tuple(tensor.shape),
                nbytes=len(data),
                xxh3=xxhash.xxh3_64_intdigest(data),
            )
        )
    manifest = Manifest(
        run="test",
        version=version,
        codec="raw",
        base=None,
        config_json=model.config.to_json_string(),
        tensors=tuple(entries),
        chunks=(),
    )
    return StagedWeights(manifest=manifest, tensors=raw)


def core_for(model: Any, version: int = 0, **options: Any) -> BuiltinCore:
    """A core that holds `model`, on the CPU where `device` says nothing else."""
    core = BuiltinCore(CoreOptions(**({"device": torch.device("cpu"), "max_context_tokens": 96} | options)))
    core.swap(core.prepare(staged(model, version)))
    return core


def start(
    lease: int, prompt: list[int], sampling: Sampling, prefix: list[int] | None = None, seed: int | None = None
) -> SequenceStart:
    return SequenceStart(
        lease=lease,
        seed=1000 + lease if seed is None else seed,
        prompt_ids=prompt,
        prefix_ids=prefix or [],
        sampling=sampling,
    )


class Collected:
    """Outputs put together from deltas, which must come without gap or overlap."""

    def __init__(self, prefixes: dict[int, list[int]] | None = None) -> None:
        self.tokens: dict[int, list[int]] = {lease: list(ids) for lease, ids in (prefixes or {}).items()}
        self.logprobs: dict[int, list[float]] = {}
        self.finishes: dict[int, Finish] = {}
        self.causes: dict[int, str] = {}
        self.versions: dict[int, list[int]] = {}

    def add(self, delta: Any) -> None:
        at = 0
        for lease, begin, count, finish in zip(delta.leases, delta.starts, delta.counts, delta.finishes, strict=True):
            assert self.finishes.get(lease, Finish.RUNNING) is Finish.RUNNING
            tokens = self.tokens.setdefault(lease, [])
            assert begin == len(tokens)
            tokens += delta.token_ids[at : at + count]
            self.logprobs.setdefault(lease, []).extend(delta.logprobs[at : at + count])
            self.versions.setdefault(lease, []).extend([delta.version] * count)
            self.finishes[lease] = finish
            at += count
        assert at == len(delta.token_ids) == len(delta.logprobs)
        self.causes |= delta.causes

    def drain(self, core: BuiltinCore) -> None:
        while (delta := core.take_delta()) is not None:
            self.add(delta)


def run_to_end(core: BuiltinCore, starts: list[SequenceStart]) -> Collected:
    collected = Collected({item.lease: list(item.prefix_ids) for item in starts})
    core.start(starts)
    collected.drain(core)
    while core.has_work:
        core.step()
        collected.drain(core)
    return collected


def fresh_logprobs(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Log-probability of each output token by transformers' own forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
