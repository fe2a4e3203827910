"""A model over several ranks: FSDP2's shards, and what has to be known of them elsewhere.

Decides how a model is cut (each layer by itself, the rest as the root), in which precision ranks exchange it, and how
full tensors come of shards and the other way round. On one rank nothing is cut. Refuses to know what is learned.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from penstock.errors import ConfigError
from penstock.train.ranks import Ranks

__all__ = ["assign", "checkpoint_activations", "full", "layers_of", "local", "place"]

M = TypeVar("M", bound=torch.nn.Module)


def place(module: M, layers: Any, ranks: Ranks, device: torch.device, dtype: str, *, cpu_offload: bool = False) -> M:
    """Brings `module`, which is in host memory, to `device`, cut over all ranks by FSDP2 (`fully_shard`).

    Each of `layers` is a unit of its own, and goes to the device by itself, so that none ever holds the whole model.
    Gradients are added up over ranks, not averaged: they are divided once, by the mini-batch's denominator. With
    `dtype="bfloat16"` layers compute and travel in bfloat16 while shards, gradients and optimizer stay float32.
    Raises ConfigError where one rank is to offload to the host.
    """
    if ranks.size == 1:
        if cpu_offload and device.type != "cpu":
            raise ConfigError(
                "train.cpu_offload and train.reference.offload keep the shards of several ranks in host memory, and "
                "this run has one; start it with torchrun, or give the reference workers (train.reference.workers)"
            )
        return module.to(device)
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    half = dtype == "bfloat16"
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None, reduce_dtype=torch.float32)
    # Host memory can be pinned only for the sake of a device.
    offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy()
    mesh = init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("data",))
    cut = functools.partial(
        fully_shard, mp_policy=precision, offload_policy=offload, reshard_after_forward=True, mesh=mesh
    )
    for layer in layers:
        cut(layer)
    cut(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # gloo has no operation that scales as it adds.
            part.set_force_sum_reduction_for_comms(True)
    return module


def layers_of(model: Any) -> list[torch.nn.Module]:
    """The decoder layers of a Hugging Face model: the modules of its longest list."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


def checkpoint_activations(layers: Iterable[torch.nn.Module]) -> None:
    """Has layers make their activations again in the backward pass rather than keep them (arXiv 1604.06174).

    Not by transformers' own switch, which works in training mode alone: passes run without dropout, in evaluation mode.
    """
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor. Every rank has to ask for it at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def assign(target: Tensor, whole: Tensor) -> None:
    """Fills `target` with this rank's part of `whole`, which every rank has."""
    if isinstance(target, DTensor):
        whole = whole.to(target.device)
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(whole)
