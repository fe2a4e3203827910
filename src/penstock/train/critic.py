"""The critic: a value for the state before each output token, learned beside the actor.

A causal LM's backbone with a value head of one number. Decides how values and their loss are computed. Refuses to know
what returns are made of. Shape suffix: `_BT`, B samples with their output tokens right-padded to T.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.train import TrainConfig
from penstock.train.actor import pick_device
from penstock.train.batching import PassBatch
from penstock.train.flops import ModelSize, forward_flops
from penstock.train.loading import load_placed
from penstock.train.losses import token_weights
from penstock.train.mini_batch import MiniBatch, OptimizerStep
from penstock.train.packing import backbone_of, hidden_states
from penstock.train.ranks import Ranks
from penstock.train.schedule import lr_at
from penstock.train.sharding import checkpoint_activations, layers_of
from penstock.train.sums import Sums

__all__ = ["Critic", "ValueModel", "value_loss"]


def value_loss(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """0.5 max((V - R)^2, (V clipped to V_old +- clip - R)^2) for each token, and where the clipped one was taken.

    As in PPO's reference implementations and verl; `clip` 0 sets no bound. Gradients flow through `values_BT` alone.
    """
    free_BT = (values_BT - returns_BT) ** 2
    if clip == 0:
        return 0.5 * free_BT, torch.zeros_like(free_BT, dtype=torch.bool)
    near_BT = torch.minimum(torch.maximum(values_BT, old_values_BT - clip), old_values_BT + clip)
    bound_BT = (near_BT - returns_BT) ** 2
    return 0.5 * torch.maximum(free_BT, bound_BT), bound_BT > free_BT


class Critic:
    """Values by the model in `folder` (a Hugging Face folder; the run's own unless `train.critic.path` names one).

    Begins with a head of zeros, so that every value is 0 until it has learned. Has its own optimizer and learning
    rate. Raises CheckpointError as the actor does.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        total_optimizer_steps: int,
        horizon_tokens: int,
        dtype: str,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.config = config
        self.dtype = dtype
        self.device = pick_device(config.device)
        self.total_optimizer_steps = total_optimizer_steps
        self.horizon_tokens = horizon_tokens
        own = config.critic
        offload = config.cpu_offload
        self.model = load_placed(folder, ValueModel, self.ranks, self.device, dtype, cpu_offload=offload)
        if config.activation_checkpointing:
            checkpoint_activations(layers_of(self.model.backbone))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=own.lr, betas=config.betas, weight_decay=own.weight_decay, fused=True
        )
        self.mini_batch = MiniBatch(list(self.model.parameters()), self.optimizer, own.max_grad_norm, self.ranks)
        self.sums = Sums()
        self.looked_flops = 0.0
        """Model FLOPs of passes without a gradient since they were last taken."""
        self.steps_skipped = 0
        """Optimizer steps refused for a non-finite loss or gradient, in the whole run."""

    def begin_step(self) -> None:
        self.mini_batch.begin()

    @torch.no_grad()
    def with_values(self, batch: PassBatch) -> PassBatch:
        """The pass with the values of its tokens, as the critic stands now."""
        batch = batch.to(self.device)
        self.looked_flops += forward_flops(ModelSize.of(self.model.backbone, has_head=False), batch)
        return replace(batch, values_BT=self._values(batch))

    def accumulate(self, batch: PassBatch) -> None:
        """One forward and backward pass over samples whose `values_BT` and `returns_BT` are known."""
        batch = batch.to(self.device)
        assert batch.values_BT is not None
        assert batch.returns_BT is not None
        values_BT = self._values(batch)
        loss_BT, clipped_BT = value_loss(values_BT, batch.values_BT, batch.returns_BT, self.config.critic.clip)
        weights = token_weights(batch.mask_BT, self.config.aggregation, self.horizon_tokens)
        self.mini_batch.add(loss_BT, weights)
        mask_BT = batch.mask_BT.to(torch.float32)
        self.sums.add("critic/loss", loss_BT, weights.weights_BT)
        self.sums.add("critic/value", values_BT, mask_BT)
        self.sums.add("critic/return", batch.returns_BT, mask_BT)
        self.sums.add("critic/clip_fraction", clipped_BT.to(torch.float32), mask_BT)

    def optimizer_step(self, position: int) -> OptimizerStep:
        """Ends a mini-batch; as the actor's."""
        own = self.config.critic
        lr = lr_at(
            position,
            peak=own.lr,
            total=self.total_optimizer_steps,
            warmup=own.warmup_steps,
            schedule=self.config.lr_schedule,
        )
        done = self.mini_batch.step(lr)
        self.steps_skipped += done.refused
        return done

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            yield name, tensor.detach()

    def _values(self, batch: PassBatch) -> Tensor:
        whole = self.dtype == "bfloat16" and self.ranks.size == 1
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=whole):
            values_N1 = self.model(batch)
        empty_BT = torch.zeros(batch.mask_BT.shape, dtype=torch.float32, device=self.device)
        return empty_BT.masked_scatter(batch.mask_BT, values_N1.float())


class ValueModel(torch.nn.Module):
    """The backbone of a causal LM, with a head of zeros."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.backbone: Any = backbone_of(lm)
        self.head = torch.nn.Linear(lm.get_output_embeddings().weight.shape[1], 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, batch: PassBatch) -> Tensor:
        """[N, 1]: of the state that each output token was drawn in, which is where its logits are computed too."""
        hidden_FD = hidden_states(self.backbone, batch.input_ids_F, batch.layout)
        # No view of it: FSDP2 warns of those.
        values_N1: Tensor = self.head(hidden_FD[batch.at_N])
        return values_N1
