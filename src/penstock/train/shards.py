"""Tensors on the disk, each rank's part of them in a file of its own, and read again by any number of ranks.

Decides the files' form: safetensors, and where a tensor is one of several ranks' parts, its offsets in the header as
`torch.distributed.checkpoint` has them (its Hugging Face storage, which reads them; so does every tool of it). One
rank's file is whole, and plain safetensors. Refuses to know what the tensors are. No pickle, neither in files nor
between ranks: that is why parts are written here and not by that package's `save`, whose plans travel as pickles.
"""

from __future__ import annotations

import json
import os
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError

__all__ = [
    "Described",
    "Shard",
    "describe",
    "fill",
    "own_shards",
    "read_whole",
    "safetensors_dtype",
    "shard_file",
    "tensor_bytes",
    "write_safetensors",
    "writer_of",
]


class Shard(NamedTuple):
    """One rank's part of a tensor, in host memory of its own."""

    name: str
    tensor: Tensor
    offsets: tuple[int, ...]
    """Of its first element in the whole tensor."""


class Described(NamedTuple):
    """A whole tensor, as its parts' headers tell of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def shard_file(kind: str, rank: int, ranks: int) -> str:
    """Name of the file with `rank`'s parts. One rank's is the name that Hugging Face's tools look for."""
    return f"{kind}.safetensors" if ranks == 1 else f"{kind}-rank-{rank + 1:05d}-of-{ranks:05d}.safetensors"


def own_shards(tensors: Iterable[tuple[str, Tensor]], *, leads: bool) -> Iterator[Shard]:
    """Copies of this rank's parts; of what every rank has whole the leader keeps the only one."""
    for name, tensor in tensors:
        if isinstance(tensor, DTensor):
            (chunk,) = tensor.__create_chunk_list__()
            part = tensor.to_local()
            # More ranks than rows leave some with nothing.
            if part.numel():
                yield Shard(name, _host_copy(part), tuple(chunk.offsets))
        elif leads:
            yield Shard(name, _host_copy(tensor), (0,) * tensor.dim())


def write_shards(path: Path, shards: Sequence[Shard], *, whole: bool) -> None:
    """Writes one rank's file; with `whole` it has all there is. Raises OSError."""
    metadata = {"format": "pt"}
    if not whole:
        offsets = {shard.name: {"saved_offsets": list(shard.offsets)} for shard in shards}
        metadata |= {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    write_safetensors(path, ((shard.name, shard.tensor) for shard in shards), metadata)


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Writes the safetensors format tensor by tensor, flushed to the disk.

    Through plain file writes, because a full disk then comes back as an OSError with its number.
    """
    named = list(tensors)
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": safetensors_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for _, tensor in named:
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def describe(files: Sequence[Path]) -> dict[str, Described]:
    """What tensors there are in a set of files. Raises CheckpointError naming the file that is missing or broken."""
    _check(files)
    found = _reader(files).read_metadata().state_dict_metadata
    return {name: Described(known.properties.dtype, tuple(known.size)) for name, known in found.items()}


def fill(files: Sequence[Path], targets: Mapping[str, Tensor]) -> None:
    """Fills `targets`, whole tensors or this rank's shards of them, each from whichever files have its parts.

    Their names, types and shapes have to be those of `describe`. Raises CheckpointError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    _check(files)
    wanted: dict[str, Any] = {name: tensor.detach() for name, tensor in targets.items()}
    with warnings.catch_warnings():
        # It says that this is no distributed load; it is none on purpose: each rank reads what it needs.
        warnings.simplefilter("ignore", UserWarning)
        try:
            load(wanted, storage_reader=_reader(files), no_dist=True)
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise CheckpointError(f"{files[0].parent} is broken: {type(cause).__name__}: {cause}") from error


def read_whole(files: Sequence[Path], names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a set of files, put together, in host memory; by default all of them. Raises CheckpointError."""
    found = describe(files)
    wanted = sorted(found) if names is None else list(names)
    tensors = {name: torch.empty(found[name].shape, dtype=found[name].dtype) for name in wanted}
    fill(files, tensors)
    return tensors


_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes as a flat memoryview: no copy where it is contiguous and in host memory."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy()))


def writer_of(tensor: Tensor, dtype: torch.dtype) -> Callable[[memoryview], None]:
    """Writes a tensor's bytes, as `dtype`, to where they belong: what is cast, or comes from a device, is nowhere else
    on the way."""

    def write(into: memoryview) -> None:
        if tensor.numel():
            torch.frombuffer(into, dtype=dtype).view(tensor.shape).copy_(tensor.detach())

    return write


def safetensors_dtype(dtype: torch.dtype) -> str:
    return _SAFETENSORS_DTYPES[dtype]


def _host_copy(tensor: Tensor) -> Tensor:
    # Contiguous, and never a view: the step goes on while it is written.
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _check(files: Sequence[Path]) -> None:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} is missing or broken: {error}") from error


def _reader(files: Sequence[Path]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystem
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    class Listed(FileSystem):
        """The folder, as if these files were all it has."""

        def ls(self, path: str | os.PathLike[str]) -> list[str]:
            return [str(file) for file in files]

    reader = HuggingFaceStorageReader(str(files[0].parent))
    reader.fs = Listed()
    return reader
