"""Splits planned from metadata: every rank gets what it needs, all ranks together the whole model, from any shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import WeightError
from penstock.weights.manifest import TensorEntry
from penstock.weights.plan import DTYPE_BYTES
from penstock.weights.reshard import (
    ModelShape,
    RankPlan,
    copy_bytes,
    from_shards,
    model_shape,
    rank_plan,
    shard_rows,
)

PREFIX = "model.layers.0."
Array = np.ndarray[Any, Any]


def model(
    shape: ModelShape, hidden: int, inner: int, *, tied: bool = False, biases: bool = True, dtype: str = "BF16"
) -> dict[str, TensorEntry]:
    """One layer of a llama with all the biases and norms that any of the families has."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}
    for layer, (rows, columns) in {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }.items():
        shapes[f"{PREFIX}{layer}.weight"] = (rows, columns)
        if biases:
            shapes[f"{PREFIX}{layer}.bias"] = (rows,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{PREFIX}{norm}.weight"] = (hidden,)
    for norm in ("q_norm", "k_norm"):
        shapes[f"{PREFIX}self_attn.{norm}.weight"] = (shape.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not tied:
        shapes["lm_head.weight"] = (shape.vocab_size, hidden)
    size = DTYPE_BYTES[dtype]
    return {
        name: TensorEntry(name=name, dtype=dtype, shape=dims, nbytes=int(np.prod(dims)) * size, xxh3=0)
        for name, dims in shapes.items()
    }


def values(tensors: Mapping[str, TensorEntry]) -> dict[str, Array]:
    """Every element of the model another number."""
    found, at = {}, 1
    for name, entry in tensors.items():
        count = int(np.prod(entry.shape))
        found[name] = np.arange(at, at + count, dtype=np.uint16 if DTYPE_BYTES[entry.dtype] == 2 else np.uint32)
        found[name] = found[name].reshape(entry.shape)
        at += count
    return found


def filled(plan: RankPlan, held: Mapping[str, Array]) -> dict[str, Array]:
    """The rank's tensors, as its copies fill them."""
    out = {}
    for target in plan.targets:
        data = bytearray(target.nbytes)
        for copy in plan.copies:
            if copy.target == target.name:
                copy_bytes(copy, held[copy.source].reshape(-1).view(np.uint8).data, memoryview(data))
        out[target.name] = np.frombuffer(bytes(data), next(iter(held.values())).dtype).reshape(target.shape)
    return out


def expected(name: str, held: Mapping[str, Array], shape: ModelShape, rank: int, ranks: int, pad_to: int) -> Array:
    """What the rank should hold of one tensor, said in another way: head by head, slice by slice."""
    whole = held[name]
    layer = name.split(".")[-2]
    if layer == "q_proj":
        heads = whole.reshape(shape.heads, shape.head_dim, *whole.shape[1:])
        mine = np.array_split(heads, ranks)[rank]
        return mine.reshape(-1, *whole.shape[1:])
    if layer in ("k_proj", "v_proj"):
        heads = whole.reshape(shape.kv_heads, shape.head_dim, *whole.shape[1:])
        # Query head h attends to key/value head h // (heads / kv_heads), so these are what the rank's queries need.
        queries = np.array_split(np.arange(shape.heads), ranks)[rank]
        needed = sorted({int(head) // (shape.heads // shape.kv_heads) for head in queries})
        return heads[needed].reshape(-1, *whole.shape[1:])
    if layer in ("gate_proj", "up_proj"):
        return np.array_split(whole, ranks)[rank]
    if layer in ("o_proj", "down_proj") and name.endswith("weight"):
        return np.array_split(whole, ranks, axis=1)[rank]
    if layer in ("embed_tokens", "lm_head"):
        step = np.lcm(pad_to, 1)
        rows = -(-(-(-shape.vocab_size // step) * step) // ranks)
        padded = np.zeros((rows * ranks, whole.shape[1]), whole.dtype)
        padded[: len(whole)] = whole
        return padded[rank * rows : (rank + 1) * rows]
    return whole


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelShape, dict[str, TensorEntry], int, int]:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % ranks == 0 or ranks % n == 0]))
    groups = draw(st.integers(1, 3)) * (ranks // kv_heads if kv_heads < ranks else 1)
    shape = ModelShape(kv_heads * groups, kv_heads, draw(st.sampled_from([2, 4])), draw(st.integers(1, 23)))
    tensors = model(
        shape,
        draw(st.integers(1, 9)),
        ranks * draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        biases=draw(st.booleans()),
        dtype=draw(st.sampled_from(["BF16", "F32"])),
    )
    # Files of weights have their tensors in any order.
    tensors = dict(draw(st.permutations(list(tensors.items()))))
    return shape, tensors, ranks, draw(st.sampled_from([1, 4, 64]))


@given(case=cases(), fused=st.booleans())
@settings(max_examples=80, deadline=None)
def test_each_rank_holds_what_its_heads_and_slices_need(
    case: tuple[ModelShape, dict[str, TensorEntry], int, int], fused: bool
) -> None:
    shape, tensors, ranks, pad_to = case
    held = values(tensors)
    for rank in range(ranks):
        plan = rank_plan(tensors.values(), shape, rank, ranks, fused=fused, pad_to=pad_to)
        found = filled(plan, held)
        want = {name: expected(name, held, shape, rank, ranks, pad_to) for name in tensors}
        if fused:
            for joined, parts in {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}.items():
                room = joined.split(".")[0]
                for kind in ("weight", "bias"):
                    names = [f"{PREFIX}{room}.{part}_proj.{kind}" for part in parts]
                    if names[0] in want:
                        want[f"{PREFIX}{joined}.{kind}"] = np.concatenate([want.pop(name) for name in names])
        assert found.keys() == want.keys()
        for name in want:
            assert np.array_equal(found[name], want[name]), name


@given(case=cases(), fused=st.booleans(), shards=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_all_ranks_together_rebuild_every_tensor_from_any_shards(
    case: tuple[ModelShape, dict[str, TensorEntry], int, int], fused: bool, shards: int
) -> None:
    shape, tensors, ranks, pad_to = case
    held = values(tensors)
    rebuilt = {name: np.zeros_like(array) for name, array in held.items()}
    parts = {name: [array[b:e] for b, e in shard_rows(len(array), shards)] for name, array in held.items()}
    for rank in range(ranks):
        plan = rank_plan(tensors.values(), shape, rank, ranks, fused=fused, pad_to=pad_to)
        out = {target.name: bytearray(target.nbytes) for target in plan.targets}
        for found in from_shards(plan.copies, tensors.values(), shards):
            shard = np.ascontiguousarray(parts[found.copy.source][found.rank])
            copy_bytes(found.copy, shard.reshape(-1).view(np.uint8).data, memoryview(out[found.copy.target]))
        direct = filled(plan, held)
        for copy in plan.copies:
            assert bytes(out[copy.target]) == direct[copy.target].tobytes()
            # The way back: what the rank has, put where it came from.
            for run in range(copy.runs):
                to = copy.source_offset + run * copy.source_stride
                at = copy.target_offset + run * copy.target_stride
                flat = rebuilt[copy.source].reshape(-1).view(np.uint8)
                flat[to : to + copy.nbytes] = np.frombuffer(out[copy.target], np.uint8)[at : at + copy.nbytes]
    for name, array in held.items():
        assert np.array_equal(rebuilt[name], array), name


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_fetches_about_its_share_of_the_model(ranks: int) -> None:
    shape = ModelShape(heads=32, kv_heads=8, head_dim=128, vocab_size=151_936)
    tensors = model(shape, 4096, 12_288, tied=False, biases=False)
    whole = sum(entry.nbytes for entry in tensors.values())
    for rank in range(ranks):
        assert rank_plan(tensors.values(), shape, rank, ranks).fetched_bytes < whole / ranks * 1.001


def test_repeated_key_value_heads_are_fetched_once_for_each_rank_that_has_them() -> None:
    shape = ModelShape(heads=8, kv_heads=2, head_dim=4, vocab_size=16)
    tensors = model(shape, 8, 16)
    held = values(tensors)
    name = f"{PREFIX}self_attn.k_proj.weight"
    plans = [rank_plan(tensors.values(), shape, rank, 8) for rank in range(8)]
    got = [filled(plan, held)[name] for plan in plans]
    assert all(np.array_equal(got[rank], held[name][:4] if rank < 4 else held[name][4:]) for rank in range(8))


def test_scales_of_quantized_matrices_go_with_their_rows() -> None:
    shape = ModelShape(heads=2, kv_heads=2, head_dim=2, vocab_size=4)
    q, o = (TensorEntry(name=f"{PREFIX}self_attn.{n}_proj.weight_scale", dtype="F32", shape=(4, 1), nbytes=16, xxh3=0)
            for n in "qo")  # fmt: skip
    plan = rank_plan([q, o], shape, 1, 2)
    assert [target.shape for target in plan.targets] == [(2, 1), (4, 1)]
    assert [copy.source_offset for copy in plan.copies] == [8, 0]


def test_shards_are_those_of_fsdp() -> None:
    import torch

    for rows in range(12):
        for ranks in range(1, 7):
            chunks = torch.chunk(torch.arange(rows), ranks) if rows else ()
            sizes = [len(chunk) for chunk in chunks] + [0] * (ranks - len(chunks))
            assert [end - begin for begin, end in shard_rows(rows, ranks)] == sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 6}, "6 attention heads"),
        ({"heads": 8, "kv_heads": 3}, "3 key/value heads"),
    ],
)
def test_heads_that_can_not_be_split_are_refused(change: dict[str, int], message: str) -> None:
    shape = ModelShape(**({"heads": 8, "kv_heads": 4, "head_dim": 2, "vocab_size": 4} | change))
    with pytest.raises(WeightError, match=message):
        rank_plan([], shape, 0, 4)


def test_what_no_split_is_known_of_is_refused_by_name() -> None:
    shape = ModelShape(heads=2, kv_heads=2, head_dim=2, vocab_size=4)
    experts = TensorEntry(name="model.layers.0.mlp.experts.gate.weight", dtype="F32", shape=(4, 4), nbytes=64, xxh3=0)
    with pytest.raises(WeightError, match=r"experts\.gate"):
        rank_plan([experts], shape, 0, 2)
    with pytest.raises(WeightError, match="gpt2"):
        model_shape({"model_type": "gpt2"})


def test_a_models_shape_is_read_from_its_configuration() -> None:
    config = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}
    assert model_shape(config | {"vocab_size": 9}) == ModelShape(4, 2, 128, 9)
    assert model_shape(config | {"vocab_size": 9, "model_type": "llama"}).head_dim == 2
