"""A weight version in eight bits: which of its tensors are quantized, and what the version is then.

Pure: a raw manifest and its byte stream in, those of the quantized version out. Its matrices have dtype I8 or F8_E4M3
under their own names, with `NAME_scale` (float32, [rows, 1]) beside each, and its config.json says so in the form of
compressed-tensors, which vLLM and SGLang read. Embeddings, the output head, norms and biases stay as they are. The
checksums are those of the quantized tensors: what a receiver must have. How a row is rounded is in `codecs.quantize`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import MissingExtra, WeightError
from penstock.weights.manifest import ChunkEntry, Manifest, TensorEntry
from penstock.weights.memory import host_buffer
from penstock.weights.plan import cut_runs, digest, tensor_offsets

__all__ = ["SCALE_SUFFIX", "SCHEME_DTYPES", "is_quantizable", "quantize", "quantized_entries", "scheme_of"]

SCALE_SUFFIX = "_scale"
SCHEME_DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}
FLOATS = ("BF16", "F16", "F32")
UNTOUCHED = ("embed_tokens", "lm_head", "norm")
"""Parts of names of matrices that engines do not take quantized."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor's place in the stream before, and in the one after."""

    entry: TensorEntry
    start: int
    to: int
    scales_to: int = -1


def is_quantizable(tensor: TensorEntry) -> bool:
    """Matrices of linear layers."""
    return (
        len(tensor.shape) == 2
        and tensor.nbytes > 0
        and tensor.dtype in FLOATS
        and tensor.name.endswith(".weight")
        and not any(part in tensor.name for part in UNTOUCHED)
    )


def quantized_entries(tensors: Iterable[TensorEntry], scheme: str) -> list[TensorEntry]:
    """The tensors of the quantized version, without checksums: codes, what stays, scales, so that dtypes lie together.

    Raises WeightError for an unknown scheme, or a tensor that has the name of another's scale.
    """
    if scheme not in SCHEME_DTYPES:
        raise WeightError(f"weights can't be quantized to {scheme!r}; expected one of {', '.join(SCHEME_DTYPES)}")
    codes, rest, scales = [], [], []
    for tensor in tensors:
        if not is_quantizable(tensor):
            rest.append(msgspec.structs.replace(tensor, xxh3=0))
            continue
        rows, columns = tensor.shape
        dtype, name = SCHEME_DTYPES[scheme], tensor.name + SCALE_SUFFIX
        codes.append(TensorEntry(name=tensor.name, dtype=dtype, shape=tensor.shape, nbytes=rows * columns, xxh3=0))
        scales.append(TensorEntry(name=name, dtype="F32", shape=(rows, 1), nbytes=4 * rows, xxh3=0))
    taken = {tensor.name for tensor in rest} & {tensor.name for tensor in scales}
    if taken:
        raise WeightError(f"tensor {min(taken)} has the name of a scale: these weights are quantized already")
    return [*codes, *rest, *scales]


def quantize(
    raw: Manifest, stream: memoryview, scheme: str, threads: Executor | None = None
) -> tuple[Manifest, memoryview]:
    """The quantized version of `raw` and its byte stream, in the raw encoding and not signed.

    Tensors are done on `threads` where given. Raises WeightError, or MissingExtra where numpy is not installed.
    """
    entries = quantized_entries(raw.tensors, scheme)
    offsets = dict(zip((entry.name for entry in entries), tensor_offsets(entries)))
    result = host_buffer(sum(entry.nbytes for entry in entries))
    pieces = [
        _Piece(entry, start, offsets[entry.name], offsets.get(entry.name + SCALE_SUFFIX, -1))
        for entry, start in zip(raw.tensors, tensor_offsets(raw.tensors))
    ]

    def one(piece: _Piece) -> None:
        _fill(piece, stream, result, scheme)

    _each(one, pieces, threads)
    done = [
        msgspec.structs.replace(entry, xxh3=digest(result[start : start + entry.nbytes]))
        for entry, start in zip(entries, tensor_offsets(entries))
    ]
    chunk_bytes = max((chunk.raw_nbytes for chunk in raw.chunks), default=1)
    chunks = tuple(
        ChunkEntry(offset=start, nbytes=size, raw_nbytes=size, xxh3=digest(result[start : start + size]))
        for start, size, _ in cut_runs(done, chunk_bytes)
    )
    config_json = with_quantization(raw.config_json, scheme)
    manifest = msgspec.structs.replace(raw, tensors=tuple(done), chunks=chunks, config_json=config_json, mac=b"")
    return manifest, result


def _fill(piece: _Piece, stream: memoryview, result: memoryview, scheme: str) -> None:
    entry = piece.entry
    source = stream[piece.start : piece.start + entry.nbytes]
    if not is_quantizable(entry):
        result[piece.to : piece.to + entry.nbytes] = source
        return
    np, quantize_rows = _rows()
    rows, columns = entry.shape
    codes = np.frombuffer(result[piece.to : piece.to + rows * columns], np.uint8)
    scales = np.frombuffer(result[piece.scales_to : piece.scales_to + 4 * rows], np.float32)
    quantize_rows(source, entry.dtype, columns, scheme, codes, scales)


def _rows() -> tuple[Any, Any]:
    try:
        import numpy

        from penstock.weights.codecs.quantize import quantize_rows
    except ImportError as error:
        raise MissingExtra("numpy", "engine", "quantized model weights") from error
    return numpy, quantize_rows


def _each(work: Any, pieces: list[_Piece], threads: Executor | None) -> None:
    # The largest first, so that no core is left with one at the end.
    ordered = sorted(pieces, key=lambda piece: -piece.entry.nbytes)
    for _ in map(work, ordered) if threads is None else threads.map(work, ordered):
        pass


def with_quantization(config_json: str, scheme: str) -> str:
    """The model's config.json with what its weights now are. One that is no JSON object stays as it is.

    The form is that of compressed-tensors: weights by channel, activations by token while the engine runs.
    """
    try:
        config = json.loads(config_json)
    except ValueError:
        return config_json
    if not isinstance(config, dict):
        return config_json
    kind = "int" if scheme == "int8" else "float"
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**numbers, "strategy": "channel", "dynamic": False},
                "input_activations": {**numbers, "strategy": "token", "dynamic": True},
            }
        },
    }
    return json.dumps(config)


def scheme_of(config: Any) -> str:
    """The scheme that `with_quantization` wrote into a parsed config.json; empty for weights in full.

    Raises WeightError for a quantization that is not one of these.
    """
    said = config.get("quantization_config") if isinstance(config, dict) else None
    if not said:
        return ""
    for scheme in SCHEME_DTYPES:
        if said == json.loads(with_quantization("{}", scheme))["quantization_config"]:
            return scheme
    raise WeightError(f"the model's config.json has a quantization_config that is not of this run's: {said!r}")
