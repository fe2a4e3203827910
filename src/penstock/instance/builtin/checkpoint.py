"""Where a model's tensors come from: a verified weight version in memory, or a Hugging Face folder.

Gives plain tensors by their Hugging Face names, checked against what the model needs; each fault names the tensor.
Knows nothing of how the decoder lays them out.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from penstock.errors import CheckpointError, WeightError
from penstock.instance.builtin.spec import ModelSpec, parse_model_spec
from penstock.weights.manifest import Manifest, StagedWeights, TensorEntry
from penstock.weights.quantization import tensors_in_full

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""safetensors' names of the dtypes that weights may have."""

_SLOW_IN_BFLOAT16 = ("DEFAULT", "AVX2")
"""x86 processors without AVX-512, in PyTorch's words: they compute it an element at a time."""

Tensors = Mapping[str, torch.Tensor]


def tensors_of_staged(weights: StagedWeights) -> dict[str, torch.Tensor]:
    """Views of a staged version's bytes as tensors; raises CheckpointError naming the tensor that does not fit.

    Matrices of a quantized version are given as code * scale, in the dtype of the tensors that are not quantized.
    """
    try:
        whole = tensors_in_full(weights)
    except WeightError as error:
        raise CheckpointError(str(error)) from error
    tensors = {}
    for entry, parts in whole:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(f"tensor {entry.name} has dtype {entry.dtype}; expected one of {', '.join(DTYPES)}")
        raw = parts[0] if isinstance(parts, tuple) else memoryview(bytearray().join(parts))
        count = math.prod(entry.shape)
        if raw.nbytes != count * dtype.itemsize:
            raise CheckpointError(
                f"tensor {entry.name} has {raw.nbytes} bytes; {entry.dtype} of shape {list(entry.shape)} takes "
                f"{count * dtype.itemsize}"
            )
        # PyTorch has no read-only tensors and warns of read-only memory, so that is copied.
        memory = bytearray(raw) if raw.readonly else raw
        flat = torch.frombuffer(memory, dtype=dtype) if count else torch.empty(0, dtype=dtype)
        tensors[entry.name] = flat.view(entry.shape)
    return tensors


def read_folder(folder: Path) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Model spec and tensors of a Hugging Face folder: config.json with model.safetensors, or an index and shards.

    Raises CheckpointError for files that are missing or broken, EngineError for a model that can't be run.
    """
    return parse_model_spec(_read_text(folder / "config.json")), _read_shards(folder)


def stage_folder(folder: Path, version: int) -> StagedWeights:
    """A Hugging Face folder as a weight version, for engines that run without a weight store."""
    import xxhash

    tensors = _read_shards(folder)
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries, raw = [], {}
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise CheckpointError(f"tensor {name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}")
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        raw[name] = flat.numpy().data
        digest = xxhash.xxh3_64_intdigest(raw[name])
        shape = tuple(tensor.shape)
        entries.append(TensorEntry(name=name, dtype=names[tensor.dtype], shape=shape, nbytes=flat.numel(), xxh3=digest))
    manifest = Manifest(
        run=str(folder),
        version=version,
        codec="raw",
        base=None,
        config_json=_read_text(folder / "config.json"),
        tensors=tuple(entries),
        chunks=(),
    )
    return StagedWeights(manifest=manifest, tensors=raw)


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return _read_shard(single)
    if not index.is_file():
        raise CheckpointError(f"{folder} holds neither {single.name} nor {index.name}")
    try:
        weight_map = json.loads(_read_text(index))["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} has no readable weight_map: {error!r}") from error
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        tensors |= _read_shard(folder / str(shard))
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{index} lists tensor {missing[0]} and its shard does not hold it")
    return tensors


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def check_tensors(spec: ModelSpec, tensors: Tensors) -> None:
    """Raises CheckpointError naming the first tensor that is missing, of the wrong shape or kind, or unknown."""
    shapes = spec.tensor_shapes()
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing; a {spec.model_type} of this config needs it")
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"tensor {name} is {tensor.dtype}; expected one of {', '.join(DTYPES)}")
    for name in tensors:
        if name not in shapes and not spec.is_redundant(name):
            raise CheckpointError(f"tensor {name} has no place in a {spec.model_type} of this config")


def serving_dtype(tensors: Iterable[torch.Tensor], device: torch.device, float32_fits: bool) -> torch.dtype:
    """The weights' own dtype; float32 where that overflows in these models (float16) or is slow on the device.

    On an x86 processor without AVX-512 a prefill in bfloat16 takes five to fourteen times as long as in float32, and a
    decode step of a few sequences as long or a third longer, with half the bytes to read. Weights and KV cache take
    twice the memory so: without `float32_fits` they are served in bfloat16 all the same.
    """
    if {tensor.dtype for tensor in tensors} != {torch.bfloat16}:
        return torch.float32
    capability = torch.backends.cpu.get_cpu_capability()
    slow = device.type == "cpu" and platform.machine() == "x86_64" and capability in _SLOW_IN_BFLOAT16
    return torch.float32 if slow and float32_fits else torch.bfloat16
