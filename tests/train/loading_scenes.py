"""One rank of two that torchrun starts: models loaded in shards, beside the same loaded whole.

Usage: loading_scenes.py OUT, where `make_folders` has made its models

Memory is counted as tensors take and leave it, and not by the process: storage by storage.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rank_scenes
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.config.train import LoraConfig
from penstock.errors import CheckpointError
from penstock.train.critic import ValueModel
from penstock.train.forward import TokenScorer
from penstock.train.loading import load_causal_lm, load_placed
from penstock.train.lora import add_adapters
from penstock.train.ranks import Ranks
from penstock.train.sharding import full, layers_of
from penstock.train.start import follow, make_learner

CPU = torch.device("cpu")


class HostBytes(TorchDispatchMode):
    """Counts what host memory tensors take: the most of any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, made)):
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                # Of a file that is mapped the kernel has pages, which it takes back when it likes.
                if storage.filename is None:
                    self._seen[storage._cdata] = weakref.ref(storage)
        # FSDP2 empties storages that it keeps, without a call that could be seen.
        alive = [storage for ref in self._seen.values() if (storage := ref()) is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in alive))
        return made


def learning(lm: Any) -> TokenScorer:
    return TokenScorer(lm)


def frozen(lm: Any) -> TokenScorer:
    return TokenScorer(lm).requires_grad_(False)


def adapted(lm: Any) -> TokenScorer:
    add_adapters(lm, LoraConfig(rank=4))
    return TokenScorer(lm)


def made(
    kind: str, folder: Path, *, backbone: bool = False, dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    """A random model of some layers and of two files, its biases and norms not what they begin with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **{**sizes, **heads, **special, **options})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model = model.to(dtype)
    (model.base_model if backbone else model).save_pretrained(folder, max_shard_size="100KB")
    return folder


FOLDERS: dict[str, dict[str, Any]] = {
    "tied": {"kind": "llama", "tie_word_embeddings": True, "num_hidden_layers": 16},
    "half": {"kind": "qwen2", "tie_word_embeddings": False, "dtype": torch.bfloat16},
    "backbone": {"kind": "gpt2", "backbone": True},
    "windows": {"kind": "gemma3_text", "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "experts": {"kind": "mixtral", "num_local_experts": 3},
}
ROLES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "actor": learning,
    "adapters": adapted,
    "reference": frozen,
    "critic": ValueModel,
}


def make_folders(out: Path) -> None:
    """In a process alone: transformers saves in another way where ranks have met."""
    for name, options in FOLDERS.items():
        made(folder=out / name, **options)
    wrong = made("llama", out / "wrong", num_hidden_layers=1)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))


def main(out: Path) -> None:
    """Writes what each load of this rank came to, to OUT/loading-RANK.json."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with contextlib.closing(Ranks.from_environment()) as ranks:
        for name in FOLDERS:
            for role, make in ROLES.items():
                if role == "actor" or name == "half" or (name, role) == ("experts", "critic"):
                    dtype = "bfloat16" if role == "actor" else "float32"
                    found[f"{name}, {role}"] = compared(out / name, make, ranks, dtype, role == "reference")
        try:
            load_placed(out / "wrong", learning, ranks, CPU, "float32")
        except CheckpointError as error:
            found["wrong"] = str(error)
        found["resumed"] = resumed(out / "tied", out / "run", ranks)
    (out / f"loading-{ranks.rank}.json").write_text(json.dumps(found, indent=1))


def resumed(folder: Path, out: Path, ranks: Ranks) -> dict[str, Any]:
    """The most host memory that a rank held as it went on from a checkpoint with an optimizer."""
    config = rank_scenes.config_of(folder)
    if ranks.leads:
        learner, _ = make_learner(config, folder, None, ranks)
        rank_scenes.gradient(learner, out)
        learner.end()
        # What is cut is held by itself, in a circle.
        del learner
        gc.collect()
        with HostBytes() as seen:
            learner, _ = make_learner(config, folder, out / f"gradient-{ranks.size}" / "step-000002", ranks)
            learner.end()
    else:
        follow(config, ranks)
        gc.collect()
        with HostBytes() as seen:
            follow(config, ranks)
    return {"most": seen.most, **sizes_of(load_causal_lm(folder))}


def compared(folder: Path, make: Callable[[Any], Any], ranks: Ranks, dtype: str, cpu_offload: bool) -> dict[str, Any]:
    """What is unlike the module that one rank has, the most bytes that were held, and what passes may hold."""
    with HostBytes() as seen:
        placed = load_placed(folder, make, ranks, CPU, dtype, cpu_offload=cpu_offload)
    whole = make(load_causal_lm(folder))
    ours, theirs = placed.state_dict(keep_vars=True), whole.state_dict(keep_vars=True)
    unlike = sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        mine, other = ours[name], theirs[name]
        if not torch.equal(full(mine.detach()), other.detach()) or mine.requires_grad != other.requires_grad:
            unlike.append(name)
    buffers = dict(placed.named_buffers())
    unlike += [name for name, own in whole.named_buffers() if not torch.equal(buffers[name], own)]
    if len(list(placed.parameters())) != len(list(whole.parameters())):
        unlike.append("what is tied")
    mine, other = (getattr(module, "lm", getattr(module, "backbone", None)) for module in (placed, whole))
    if mine.config._attn_implementation != other.config._attn_implementation:
        unlike.append(f"attention: {mine.config._attn_implementation}")
    return {"unlike": unlike, "most": seen.most, **sizes_of(whole)}


def sizes_of(whole: torch.nn.Module) -> dict[str, int]:
    """Bytes of a model, and of what passes hold of it at once: layers on their way, and what is in no layer, twice."""
    total = sum(tensor.nbytes for tensor in whole.parameters())
    layers = [sum(tensor.nbytes for tensor in layer.parameters()) for layer in layers_of(whole)]
    return {"whole": total, "passes": 4 * max(layers) + 2 * (total - sum(layers))}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
