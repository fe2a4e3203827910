"""What the KL penalty's reference is, and where it is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.config.section import Section


class ReferenceConfig(Section):
    """The frozen model that `train.kl_coef` holds the policy to (docs/training.md)."""

    path: str = ""
    """A model folder with the same tokens; by default the model that the run began with."""
    offload: bool = False
    """Of several ranks: its shards stay in host memory and come to the device layer by layer."""
    workers: int = Field(default=0, ge=0)
    """Above 0: it is on so many workers of its own, and says how likely a sample's tokens are while others are still
    generated. 0: beside the actor, cut over the same ranks."""
    on: Literal["local", "ray"] = "local"
    """Workers are processes of this machine, or actors on Ray."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """Ray: GPUs that each worker is given."""
    device: str = "auto"
    """Of workers: `cpu`, `cuda`, `cuda:1`, or `auto`: the GPUs in turn, where there are any."""
    samples_per_call: int = Field(default=64, ge=1)
    """Most samples in one call of the workers."""
    timeout_s: float = Field(default=120.0, gt=0)
    """For one call; its workers are then replaced, and its samples are unscored."""
