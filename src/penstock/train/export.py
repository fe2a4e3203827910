"""A checkpoint as a Hugging Face model folder: weights put together, tokenizer and configuration beside them.

Decides what such a folder has and how its weights are cut into files. Refuses to know about optimizers and runs.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from penstock.errors import StorageError
from penstock.train.checkpoint import copy_tokenizer, files_of, read_position
from penstock.train.shards import Described, describe, read_whole, write_safetensors

__all__ = ["DTYPES", "export_model"]

FILE_BYTES = 4 * 2**30
"""Of weights in one file, and so in memory at once; a larger tensor has a file of its own."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_model(checkpoint: Path, out: Path, dtype: str = "float32", *, file_bytes: int = FILE_BYTES) -> Path:
    """Makes the model folder `out` of a checkpoint; `dtype` is one of DTYPES. A folder that is there is replaced.

    One rank's weights as they are are linked, not copied, where the disk can. Raises CheckpointError for a checkpoint
    that is broken, StorageError where the disk refuses; what was at `out` is then as it was.
    """
    read_position(checkpoint)
    files = files_of(checkpoint, "model")
    known = describe(files)
    unfinished = out.with_name(f".exporting-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
        copy_tokenizer(checkpoint, unfinished)
        config = json.loads((checkpoint / "config.json").read_text())
        (unfinished / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))
        if len(files) == 1 and dtype == "float32":
            _link_or_copy(files[0], unfinished / "model.safetensors")
        else:
            _write_weights(unfinished, files, known, DTYPES[dtype], file_bytes)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(unfinished, out)
    except OSError as error:
        raise StorageError(f"the model can't be written to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return out


def _write_weights(
    folder: Path, files: Sequence[Path], known: Mapping[str, Described], dtype: torch.dtype, file_bytes: int
) -> None:
    """As `save_pretrained` cuts them: one file, or numbered ones and an index."""
    groups = list(_grouped(known, file_bytes))
    place: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = [
            (key, tensor.to(dtype) if tensor.is_floating_point() else tensor)
            for key, tensor in read_whole(files, names).items()
        ]
        write_safetensors(folder / name, tensors, {"format": "pt"})
        place |= dict.fromkeys(names, name)
        total += sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _grouped(known: Mapping[str, Described], file_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    nbytes = 0
    for name in sorted(known):
        size = torch.Size(known[name].shape).numel() * known[name].dtype.itemsize
        if group and nbytes + size > file_bytes:
            yield group
            group, nbytes = [], 0
        group.append(name)
        nbytes += size
    yield group


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another disk, or one without links.
        shutil.copyfile(source, target)
