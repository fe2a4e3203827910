"""Low-rank adapters: what is learned is small, what is sent is whole.

Decides which layers get adapters (LoRA, arXiv 2106.09685, by `peft`) and how they are merged for engines, which know
nothing of them. Refuses to know what is learned.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.config.train import LoraConfig
from penstock.errors import ConfigError, MissingExtra
from penstock.train.sharding import full

__all__ = ["ADAPTER", "add_adapters", "merged_tensors", "without_adapters"]

ADAPTER = "default"
_BASE, _DOWN, _UP = ".base_layer.", ".lora_A.", ".lora_B."


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freezes `model` and puts adapters into it, in place. They begin as nothing: B is zero.

    Raises MissingExtra without the lora extra, ConfigError where no layer has a name of `targets`.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise MissingExtra("peft", "lora", "training adapters") from error
    targets: Any = "all-linear" if config.targets == ["all-linear"] else list(config.targets)
    model.requires_grad_(False)
    peft = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=targets)
    # all-linear leaves the head alone, which it knows by the task.
    peft.task_type = "CAUSAL_LM"
    try:
        # A is drawn, and must be the same on every rank.
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inject_adapter_in_model(peft, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(f"train.lora.targets={json.dumps(config.targets)}: {error}") from error
    if any(_DOWN in name for name, _ in model.get_output_embeddings().named_parameters(prefix="head.")):
        raise ConfigError(
            f"train.lora.targets={json.dumps(config.targets)} names the model's head, which can't have adapters"
        )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_DOWN in name or _UP in name)


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The model as it was before it learned anything."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_name(name: str) -> str:
    """Of a tensor as the model has it without adapters; empty for one that is an adapter's."""
    if _DOWN in name or _UP in name:
        return ""
    layer, _, kind = name.partition(_BASE)
    return f"{layer}.{kind}" if kind else name


def merged_tensors(named: Iterator[tuple[str, Tensor]], model: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names that the model has without adapters, W + scaling B A where there is one; whole."""
    parts = dict(named)
    for name, tensor in parts.items():
        whole_name = merged_name(name)
        if not whole_name:
            continue
        if whole_name == name:
            yield name, full(tensor)
            continue
        layer, _, kind = name.partition(_BASE)
        merged = full(tensor)
        if kind == "weight":
            down = full(parts[f"{layer}{_DOWN}{ADAPTER}.weight"])
            up = full(parts[f"{layer}{_UP}{ADAPTER}.weight"])
            part = model.get_submodule(layer)
            added = part.scaling[ADAPTER] * (up.float() @ down.float())
            # GPT-2's linear layers keep their weights the other way round.
            merged = (merged.float() + (added.T if part.fan_in_fan_out else added)).to(merged.dtype)
        yield whole_name, merged
