"""One rank's share of a weight version: its own tensors, out of the byte ranges that it needs and no others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import msgspec

from penstock.errors import CheckpointError, WeightError
from penstock.instance.builtin.spec import ModelSpec
from penstock.weights.manifest import Manifest, StagedWeights, TensorEntry
from penstock.weights.memory import host_buffer
from penstock.weights.plan import check_tensors, digest, tensor_offsets
from penstock.weights.reshard import RankPlan, copy_bytes, model_shape, rank_plan

__all__ = ["plan_share", "share_of_staged", "staged_share", "write_share"]


def plan_share(weights: StagedWeights, spec: ModelSpec, rank: int, ranks: int) -> RankPlan:
    """Raises CheckpointError naming a tensor that can't be split."""
    needed = [entry for entry in weights.manifest.tensors if not spec.is_redundant(entry.name)]
    try:
        return rank_plan(needed, model_shape(json.loads(weights.manifest.config_json)), rank, ranks)
    except WeightError as error:
        raise CheckpointError(f"weight version {weights.version} can't be split: {error}") from error


def share_bytes(plan: RankPlan) -> int:
    return sum(target.nbytes for target in plan.targets)


def write_share(plan: RankPlan, tensors: Mapping[str, memoryview], into: memoryview) -> tuple[TensorEntry, ...]:
    """Fills `into`, which is zero, with the rank's tensors one after the other, and says what they are.

    Raises CheckpointError naming a tensor whose bytes are not there.
    """
    starts = dict(zip((target.name for target in plan.targets), tensor_offsets(plan.targets)))
    sizes = {target.name: target.nbytes for target in plan.targets}
    for copy in plan.copies:
        source = tensors.get(copy.source)
        if source is None or source.nbytes < copy.source_offset + (copy.runs - 1) * copy.source_stride + copy.nbytes:
            raise CheckpointError(f"the bytes of tensor {copy.source} are not there")
        start = starts[copy.target]
        copy_bytes(copy, source, into[start : start + sizes[copy.target]])
    return tuple(
        msgspec.structs.replace(target, xxh3=digest(into[start : start + target.nbytes]))
        for target, start in zip(plan.targets, starts.values(), strict=True)
    )


def share_of_staged(weights: StagedWeights, spec: ModelSpec, rank: int, ranks: int) -> StagedWeights:
    """The rank's own tensors as a version of their own."""
    plan = plan_share(weights, spec, rank, ranks)
    stream = host_buffer(share_bytes(plan))
    entries = write_share(plan, weights.tensors, stream)
    return staged_share(weights.version, weights.manifest.config_json, entries, stream)


def staged_share(
    version: int, config_json: str, tensors: Iterable[TensorEntry], stream: memoryview, verify: bool = False
) -> StagedWeights:
    """A rank's tensors that lie one after the other. With `verify`, raises WeightError where a checksum is wrong."""
    entries = tuple(tensors)
    manifest = Manifest(
        run="", version=version, codec="raw", base=None, config_json=config_json, tensors=entries, chunks=()
    )
    views = {entry.name: stream[start : start + entry.nbytes] for entry, start in zip(entries, tensor_offsets(entries))}
    if verify:
        check_tensors(manifest, views)
    return StagedWeights(manifest=manifest, tensors=views)
