"""A weight version in eight bits: which of its tensors are quantized, and what the version is then.

Pure: a raw manifest and its byte stream in, those of the quantized version out. Its matrices have dtype I8 or F8_E4M3
under their own names, with `NAME_scale` (float32, [rows, 1]) beside each, and its config.json says so in the form of
compressed-tensors, which vLLM and SGLang read. Embeddings, the output head, norms and biases stay as they are. The
checksums are those of the quantized tensors: what a receiver must have. How a row is rounded is in `codecs.quantize`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import MissingExtra, WeightError
from penstock.weights.manifest import ChunkEntry, Manifest, StagedWeights, TensorEntry
from penstock.weights.memory import host_buffer
from penstock.weights.plan import cut_runs, digest, tensor_offsets

__all__ = [
    "CODE_DTYPES",
    "SCALE_SUFFIX",
    "SCHEME_DTYPES",
    "is_quantizable",
    "is_quantized",
    "quantize",
    "quantized_entries",
    "scheme_of",
    "tensors_in_full",
]

SCALE_SUFFIX = "_scale"
SCHEME_DTYPES = {"int8": "I8", "fp8": "F8_E4M3"}
CODE_DTYPES = {dtype: scheme for scheme, dtype in SCHEME_DTYPES.items()}
"""Of quantized matrices, and by what they were quantized."""
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
    np, rounding = _rows()
    rows, columns = entry.shape
    codes = np.frombuffer(result[piece.to : piece.to + rows * columns], np.uint8)
    scales = np.frombuffer(result[piece.scales_to : piece.scales_to + 4 * rows], np.float32)
    rounding.quantize_rows(source, entry.dtype, columns, scheme, codes, scales)


def _rows() -> tuple[Any, Any]:
    try:
        import numpy

        from penstock.weights.codecs import quantize as rounding
    except ImportError as error:
        raise MissingExtra("numpy", "engine", "quantized model weights") from error
    return numpy, rounding


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


@dataclass(frozen=True, slots=True)
class InFull:
    """The bytes of the floats that a matrix's codes stand for; made while they are iterated, some rows at a time."""

    codes: memoryview
    scales: memoryview
    columns: int
    scheme: str
    dtype: str

    def __iter__(self) -> Iterator[memoryview]:
        np, rows = _rows()
        return rows.dequantized(
            self.codes, np.frombuffer(self.scales, np.float32), self.columns, self.scheme, self.dtype
        )


def tensors_in_full(weights: StagedWeights) -> list[tuple[TensorEntry, Iterable[memoryview]]]:
    """The tensors of a version with code * scale for its quantized matrices, and without the scales.

    They have the dtype of what was not quantized, float32 where that is not one; how far each may be off is in
    `codecs.quantize`. Nothing is computed before a tensor's bytes are iterated. Raises WeightError for codes without
    scales or of another size than they say, and MissingExtra where numpy is not installed (then only while iterating).
    """
    entries = {entry.name: entry for entry in weights.manifest.tensors}
    codes = {name for name, entry in entries.items() if entry.dtype in CODE_DTYPES and len(entry.shape) == 2}
    scales = {name + SCALE_SUFFIX for name in codes}
    kept = {entry.dtype for name, entry in entries.items() if name not in codes and name not in scales}
    dtype = kept.pop() if len(kept) == 1 else "F32"
    tensors: list[tuple[TensorEntry, Iterable[memoryview]]] = []
    for name, entry in entries.items():
        raw = weights.tensors.get(name)
        if raw is None:
            raise WeightError(f"weight version {weights.version} lacks the bytes of tensor {name}")
        if name in scales:
            continue
        if name not in codes:
            tensors.append((entry, (raw,)))
            continue
        (rows, columns), scale = entry.shape, entries.get(name + SCALE_SUFFIX)
        beside = weights.tensors.get(name + SCALE_SUFFIX)
        if scale is None or scale.dtype != "F32" or beside is None or beside.nbytes != 4 * rows:
            raise WeightError(f"tensor {name} is quantized and comes without a float32 scale for each row")
        if raw.nbytes != rows * columns:
            raise WeightError(f"tensor {name} has {raw.nbytes} bytes and not {rows} x {columns}")
        whole = InFull(raw, beside, columns, CODE_DTYPES[entry.dtype], dtype)
        nbytes = rows * columns * (4 if dtype == "F32" else 2)
        tensors.append((TensorEntry(name=name, dtype=dtype, shape=entry.shape, nbytes=nbytes, xxh3=0), whole))
    return tensors


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


def is_quantized(config: Any) -> bool:
    """Whether a parsed config.json is that of a version quantized here."""
    try:
        return bool(scheme_of(config))
    except WeightError:
        return False
