"""Which bytes of a model each tensor-parallel rank needs, and which trainer's shard has them; from metadata alone.

Decides how the tensors of llama, qwen2 and qwen3 models are split: projections of queries, keys, values, gate
and up by rows (column-parallel linear layers), those of the attention's output and of down by columns (row-parallel),
embeddings and head by rows of a padded vocabulary, all else replicated, as Megatron-LM does (arXiv 1909.08053) and
vLLM and SGLang after it. With fewer key/value heads than ranks, a head is held by several ranks. Refuses to know what
the bytes are, where they lie and how they move.

A copy is a number of equal runs at a fixed stride, in the source tensor and in the target: rows are one run, a slice
of columns is one run a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from penstock.errors import WeightError
from penstock.weights.manifest import TensorEntry
from penstock.weights.plan import DTYPE_BYTES

__all__ = [
    "Copy",
    "ModelShape",
    "RankPlan",
    "ShardCopy",
    "copy_bytes",
    "from_shards",
    "model_shape",
    "rank_plan",
    "shard_rows",
]

ROW_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMN_SPLIT = ("o_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""As vLLM and SGLang name what they have joined, and the place in it."""
MODEL_TYPES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a split has to know beside the tensors' own shapes."""

    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`runs` times `nbytes` from one tensor to another; run k begins at offset + k * stride on either side."""

    source: str
    target: str
    source_offset: int
    target_offset: int
    nbytes: int
    runs: int = 1
    source_stride: int = 0
    target_stride: int = 0

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.runs


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """A copy whose source is the shard of one trainer's rank, its offsets within that shard."""

    rank: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's tensors and where their bytes come from. Bytes that no copy fills (a padded vocabulary) are zero."""

    rank: int
    targets: tuple[TensorEntry, ...]
    copies: tuple[Copy, ...]

    @property
    def fetched_bytes(self) -> int:
        return sum(copy.total_bytes for copy in self.copies)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """From a Hugging Face config.json. Raises WeightError for a model whose split is not known here."""
    if config.get("model_type") not in MODEL_TYPES:
        raise WeightError(f"no split is known of model_type {config.get('model_type')!r}; known: {MODEL_TYPES}")
    try:
        heads = int(config["num_attention_heads"])
        default = 128 if config["model_type"] == "qwen3" else int(config["hidden_size"]) // heads
        return ModelShape(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or default),
            vocab_size=int(config["vocab_size"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise WeightError(f"the model's config.json does not say its heads or vocabulary: {error!r}") from error


def rank_plan(
    tensors: Iterable[TensorEntry], shape: ModelShape, rank: int, ranks: int, *, fused: bool = False, pad_to: int = 1
) -> RankPlan:
    """What `rank` of `ranks` needs of the model in `tensors` (their Hugging Face names).

    `fused`: queries, keys and values are one tensor, and so are gate and up, as vLLM and SGLang hold them. `pad_to`:
    the vocabulary is padded to a multiple of it (and of `ranks`). A tied head that is not among the tensors is not
    among the targets. Scales of quantized matrices go with their rows. Raises WeightError for what can't be split so.
    """
    if not 0 <= rank < ranks:
        raise WeightError(f"rank {rank} is not one of {ranks}")
    _check_heads(shape, ranks)
    parts: dict[str, list[tuple[int, TensorEntry, list[Copy]]]] = {}
    for tensor in tensors:
        name, place = _target_of(tensor.name, fused)
        parts.setdefault(name, []).append((place, *_part(tensor, name, shape, rank, ranks, pad_to)))
    targets, copies = [], []
    for name, pieces in parts.items():
        target, moved = _joined(name, sorted(pieces, key=lambda piece: piece[0]))
        targets.append(target)
        copies += moved
    return RankPlan(rank, tuple(targets), tuple(copies))


def shard_rows(rows: int, ranks: int) -> list[tuple[int, int]]:
    """(begin, end) of dimension 0 that each rank of FSDP2 holds: equal blocks, rounded up; the last may lack some.

    As `torch.distributed.tensor.Shard(0)` cuts: with 5 rows on 4 ranks 2, 2, 1 and 0.
    """
    each = -(-rows // ranks)
    return [(min(rank * each, rows), min((rank + 1) * each, rows)) for rank in range(ranks)]


def from_shards(copies: Iterable[Copy], tensors: Iterable[TensorEntry], ranks: int) -> list[ShardCopy]:
    """The same copies, out of the shards that `ranks` ranks of FSDP2 hold of `tensors`."""
    entries = {tensor.name: tensor for tensor in tensors}
    return [found for copy in copies for found in _sharded(copy, entries[copy.source], ranks)]


def copy_bytes(copy: Copy, source: memoryview, target: memoryview) -> None:
    """Carries a copy out. Needs numpy where there is more than one run."""
    if copy.runs == 1 or copy.source_stride == copy.target_stride == copy.nbytes:
        target[copy.target_offset : copy.target_offset + copy.total_bytes] = source[
            copy.source_offset : copy.source_offset + copy.total_bytes
        ]
        return
    import numpy as np

    def runs(data: memoryview, offset: int, stride: int) -> Any:
        flat = np.frombuffer(data, np.uint8)
        # Checked here, since a strided view checks nothing.
        if offset + (copy.runs - 1) * stride + copy.nbytes > len(flat):
            raise WeightError(f"a copy of {copy.source} reaches beyond its {len(flat)} bytes")
        return np.lib.stride_tricks.as_strided(flat[offset:], (copy.runs, copy.nbytes), (stride, 1))

    runs(target, copy.target_offset, copy.target_stride)[:] = runs(source, copy.source_offset, copy.source_stride)


def _check_heads(shape: ModelShape, ranks: int) -> None:
    if shape.heads % ranks:
        raise WeightError(f"{shape.heads} attention heads can't be split on {ranks} ranks")
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise WeightError(f"{shape.kv_heads} key/value heads can be neither split nor repeated on {ranks} ranks")


def _target_of(name: str, fused: bool) -> tuple[str, int]:
    """The name of the tensor that this one is part of, and the place in it."""
    module, _, kind = name.rpartition(".")
    parent, _, layer = module.rpartition(".")
    if fused and layer in FUSED:
        joined, place = FUSED[layer]
        return f"{parent}.{joined}.{kind}", place
    return name, 0


def _part(
    tensor: TensorEntry, target: str, shape: ModelShape, rank: int, ranks: int, pad_to: int
) -> tuple[TensorEntry, list[Copy]]:
    """What one rank holds of a tensor, as a tensor of its own."""
    layer = tensor.name.rpartition(".")[0].rpartition(".")[2]
    kind = tensor.name.rpartition(".")[2]
    if kind not in ("weight", "bias", "weight_scale") or not tensor.shape:
        raise WeightError(f"no split is known of tensor {tensor.name}")
    if layer in ROW_SPLIT:
        begin, end = _rows_of(layer, tensor, shape, rank, ranks)
        return _rows(tensor, target, begin, end, end - begin)
    if layer in COLUMN_SPLIT and kind == "weight":
        return _columns(tensor, target, rank, ranks)
    if layer in VOCABULARY:
        return _vocabulary(tensor, target, shape, rank, ranks, pad_to)
    if layer in COLUMN_SPLIT or layer.endswith("norm"):
        return _rows(tensor, target, 0, tensor.shape[0], tensor.shape[0])
    raise WeightError(f"no split is known of tensor {tensor.name}")


def _rows_of(layer: str, tensor: TensorEntry, shape: ModelShape, rank: int, ranks: int) -> tuple[int, int]:
    rows = tensor.shape[0]
    if layer in ("k_proj", "v_proj"):
        _expect(tensor, shape.kv_heads * shape.head_dim)
        if shape.kv_heads < ranks:
            head = rank // (ranks // shape.kv_heads)
            return head * shape.head_dim, (head + 1) * shape.head_dim
    elif layer == "q_proj":
        _expect(tensor, shape.heads * shape.head_dim)
    if rows % ranks:
        raise WeightError(f"tensor {tensor.name} has {rows} rows, which can't be split on {ranks} ranks")
    each = rows // ranks
    return rank * each, (rank + 1) * each


def _expect(tensor: TensorEntry, rows: int) -> None:
    if tensor.shape[0] != rows:
        raise WeightError(f"tensor {tensor.name} has {tensor.shape[0]} rows, and its model's heads make {rows}")


def _rows(tensor: TensorEntry, target: str, begin: int, end: int, rows: int) -> tuple[TensorEntry, list[Copy]]:
    """Rows `begin` to `end`, at the top of a target of `rows`."""
    row_bytes = _row_bytes(tensor)
    copies = []
    if end > begin and row_bytes:
        copies.append(Copy(tensor.name, target, begin * row_bytes, 0, (end - begin) * row_bytes))
    return _entry(tensor, target, (rows, *tensor.shape[1:])), copies


def _columns(tensor: TensorEntry, target: str, rank: int, ranks: int) -> tuple[TensorEntry, list[Copy]]:
    rows, columns = tensor.shape
    if columns % ranks:
        raise WeightError(f"tensor {tensor.name} has {columns} columns, which can't be split on {ranks} ranks")
    row_bytes = _row_bytes(tensor)
    part = row_bytes // ranks
    copy = Copy(tensor.name, target, rank * part, 0, part, rows, row_bytes, part)
    return _entry(tensor, target, (rows, columns // ranks)), [copy]


def _vocabulary(
    tensor: TensorEntry, target: str, shape: ModelShape, rank: int, ranks: int, pad_to: int
) -> tuple[TensorEntry, list[Copy]]:
    _expect(tensor, shape.vocab_size)
    padded = -(-shape.vocab_size // pad_to) * pad_to
    each = -(-padded // ranks)
    begin, end = min(rank * each, shape.vocab_size), min((rank + 1) * each, shape.vocab_size)
    return _rows(tensor, target, begin, end, each)


def _joined(name: str, pieces: Sequence[tuple[int, TensorEntry, list[Copy]]]) -> tuple[TensorEntry, list[Copy]]:
    """Pieces below each other in one tensor."""
    first = pieces[0][1]
    rows, at, copies = 0, 0, []
    for _, entry, moved in pieces:
        if entry.dtype != first.dtype or entry.shape[1:] != first.shape[1:]:
            raise WeightError(f"the parts of {name} differ in dtype or width, so they can't be one tensor")
        copies += [replace(copy, target_offset=copy.target_offset + at) for copy in moved]
        rows, at = rows + entry.shape[0], at + entry.nbytes
    return _entry(first, name, (rows, *first.shape[1:])), copies


def _row_bytes(tensor: TensorEntry) -> int:
    return prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]


def _entry(tensor: TensorEntry, name: str, shape: tuple[int, ...]) -> TensorEntry:
    nbytes = prod(shape) * DTYPE_BYTES[tensor.dtype]
    return TensorEntry(name=name, dtype=tensor.dtype, shape=shape, nbytes=nbytes, xxh3=0)


def _sharded(copy: Copy, tensor: TensorEntry, ranks: int) -> Iterator[ShardCopy]:
    row_bytes = _row_bytes(tensor)
    for rank, (begin, end) in enumerate(shard_rows(tensor.shape[0], ranks)):
        low, high = begin * row_bytes, end * row_bytes
        found = _within(copy, low, high)
        if found is not None:
            yield ShardCopy(rank, replace(found, source_offset=found.source_offset - low))


def _within(copy: Copy, low: int, high: int) -> Copy | None:
    """The part of a copy whose source lies in [low, high); several runs are slices of rows, which no shard cuts."""
    if copy.runs == 1:
        begin, end = max(copy.source_offset, low), min(copy.source_offset + copy.nbytes, high)
        if begin >= end:
            return None
        ahead = begin - copy.source_offset
        return replace(copy, source_offset=begin, target_offset=copy.target_offset + ahead, nbytes=end - begin)
    first = max(0, -(-(low - copy.source_offset) // copy.source_stride))
    last = min(copy.runs, max(0, -(-(high - copy.source_offset) // copy.source_stride)))
    if first >= last:
        return None
    return replace(
        copy,
        source_offset=copy.source_offset + first * copy.source_stride,
        target_offset=copy.target_offset + first * copy.target_stride,
        runs=last - first,
    )
