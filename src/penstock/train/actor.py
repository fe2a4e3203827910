"""The model that learns: forward and backward passes, the optimizer step, the weights to send.

Decides how a pass becomes gradient. Refuses to know where samples come from, how advantages are made and who gets the
weights.

Weights, gradients and optimizer state are float32. With `dtype="bfloat16"` the passes run under autocast and the
weights are sent as bfloat16: at post-training learning rates most steps are smaller than bfloat16 can hold, and would
be lost. Dropout stays off, so that a pass gives the log-probabilities that sampling saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.run import old_logprobs_refusal
from penstock.config.train import TrainConfig
from penstock.errors import ConfigError
from penstock.train.batching import PassBatch
from penstock.train.flops import ModelSize, forward_flops
from penstock.train.forward import TokenScorer, TokenScores
from penstock.train.loading import load_placed
from penstock.train.lora import add_adapters, merged_name, merged_tensors, without_adapters
from penstock.train.losses import approximate_kl, token_weights, truncated_importance
from penstock.train.mini_batch import MiniBatch, OptimizerStep
from penstock.train.policy_losses import get_loss
from penstock.train.ranks import Ranks
from penstock.train.schedule import lr_at
from penstock.train.sharding import checkpoint_activations, layers_of, local
from penstock.train.shards import safetensors_dtype, writer_of
from penstock.train.sums import Sums
from penstock.weights.gather import gathered, hf_name
from penstock.weights.published import Shaped, Writer

__all__ = ["Actor", "NamedTensor", "pick_device"]

NamedTensor = tuple[str, str, tuple[int, ...], Writer]
"""Hugging Face name, dtype as in safetensors, shape, raw little-endian bytes."""


class Actor:
    """A causal LM with its optimizer, its reference and, where needed, the step's first weights.

    `folder` is a Hugging Face model folder of any causal LM. `total_optimizer_steps` and the configuration
    give the learning rate, `horizon_tokens` the constant length of `seq-mean-token-sum-norm`. The reference is frozen:
    a copy of the folder's model (or of `config.reference.path`), cut over the ranks as the actor is; made only where
    `config.kl_coef` is above 0 and it has no workers of its own; not changed by `checkpoint.load`. Raises
    CheckpointError for a missing or broken model, ConfigError for one that can't be offloaded.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        total_optimizer_steps: int,
        horizon_tokens: int,
        dtype: str = "float32",
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or Ranks()
        self.folder = folder
        self.config = config
        self.dtype = dtype
        self.device = pick_device(config.device)
        self._policy_loss = get_loss(config.loss)
        self.total_optimizer_steps = total_optimizer_steps
        self.horizon_tokens = horizon_tokens
        if config.threads:
            torch.set_num_threads(config.threads)
        self._scorer = self._made()
        self.model = self._scorer.lm
        if config.activation_checkpointing:
            checkpoint_activations(layers_of(self.model))
        self.reference = self._reference()
        self._snapshot: TokenScorer | None = None
        self.optimizer = torch.optim.AdamW(
            self.learned,
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.sums = Sums()
        self.kl_coef = config.kl_coef
        """Weight of the KL penalty now; the adaptive controller moves it."""
        self.steps_skipped = 0
        """Optimizer steps refused for a non-finite loss or gradient, in the whole run."""
        self.mini_batch = MiniBatch(self.learned, self.optimizer, config.max_grad_norm, self.ranks)
        self.looked_flops = 0.0
        """Model FLOPs of passes without a gradient (old and reference log-probabilities) since they were last taken."""
        self._moved = False
        self._temperature = 1.0
        self._old_from_rollout = False

    @property
    def old_from_rollout(self) -> bool:
        """Whether the engines' log-probabilities are the old ones in this step."""
        return self._old_from_rollout

    @property
    def old_takes_a_pass(self) -> bool:
        """Whether the step's first weights are others than now, and old log-probabilities theirs."""
        return not self._old_from_rollout and self._moved and self._snapshot is not None

    @property
    def learned(self) -> list[torch.nn.Parameter]:
        """The parameters that the optimizer moves."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    # ---- one training step

    def begin_step(self, temperature: float = 1.0) -> None:
        """Begins a step whose tokens are drawn at `temperature`, above 0.

        New, old and reference log-probabilities and the entropy are all of softmax(logits / temperature). Remembers
        the step's first weights where old log-probabilities are computed from them. Raises ConfigError where old ones
        are to come from the rollout, which reports those of temperature 1, and `temperature` is another.
        """
        if temperature <= 0:
            raise ConfigError(f"rollout.sampling.temperature={temperature:g}: greedy tokens can't be trained on")
        if temperature != 1.0 and self.config.old_logprobs == "rollout":
            raise ConfigError(old_logprobs_refusal(temperature))
        self._temperature = temperature
        self._old_from_rollout = self.config.old_logprobs != "recompute" and temperature == 1.0
        self._moved = False
        self.mini_batch.begin()
        if not self._old_from_rollout and self.config.mini_batches_per_step > 1:
            self._remember_weights()

    def accumulate(self, batch: PassBatch) -> None:
        """One forward and backward pass: adds the un-normalised gradient of the pass's samples."""
        config = self.config
        batch = batch.to(self.device)
        weights = token_weights(batch.mask_BT, config.aggregation, self.horizon_tokens)
        scores = self._score(self._scorer, batch, entropy_gradient=config.entropy_coef > 0)
        old_logprobs_BT = self._old_logprobs(batch, scores)
        policy = self._policy_loss(scores.logprobs_BT, old_logprobs_BT, batch.advantages_BT, batch.mask_BT, config)
        loss_BT = policy.loss_BT
        mask_BT = batch.mask_BT.to(torch.float32)
        if config.rollout_correction != "off":
            weight_BT = truncated_importance(
                old_logprobs_BT,
                batch.rollout_logprobs_BT,
                batch.mask_BT,
                config.rollout_correction_cap,
                sequence=config.rollout_correction == "sequence",
            )
            loss_BT = loss_BT * weight_BT
            self.sums.add("rollout_correction", weight_BT, mask_BT)
        if config.kl_coef > 0 and config.kl_in == "loss":
            reference_BT = self._reference_logprobs(batch)
            kl_BT = approximate_kl(scores.logprobs_BT, reference_BT, config.kl_estimator)
            loss_BT = loss_BT + self.kl_coef * kl_BT
            self.sums.add("kl", kl_BT, mask_BT)
        if config.entropy_coef > 0:
            loss_BT = loss_BT - config.entropy_coef * scores.entropy_BT
        self.mini_batch.add(loss_BT, weights)
        self.sums.add("loss", loss_BT, weights.weights_BT)
        self.sums.add("entropy", scores.entropy_BT, mask_BT)
        self.sums.add("clip_fraction", policy.clipped_BT.to(torch.float32), mask_BT)
        self.sums.add("clip_fraction_low", (policy.clipped_BT & (policy.ratio_BT < 1)).to(torch.float32), mask_BT)
        self.sums.add("clip_fraction_high", (policy.clipped_BT & (policy.ratio_BT > 1)).to(torch.float32), mask_BT)
        self.sums.add("ratio", policy.ratio_BT, mask_BT)
        self.sums.add("policy_kl", approximate_kl(old_logprobs_BT, scores.logprobs_BT.detach(), "k3"), mask_BT)
        if not self._moved:
            # Both sides hold the same weights here, so whatever differs is the engines' arithmetic.
            # Engines report log-probabilities at temperature 1, so that is what they are compared at.
            gap_BT = (scores.model_logprobs_BT - batch.rollout_logprobs_BT).abs()
            self.sums.add("rollout_logprob_gap", gap_BT, mask_BT)

    def optimizer_step(self, position: int) -> OptimizerStep:
        """Ends a mini-batch; `position` counts the optimizer steps of the run.

        A mini-batch without any pass changes nothing. A non-finite gradient (a non-finite loss makes one) leaves
        weights and optimizer as they were and is counted.
        """
        config = self.config
        lr = lr_at(
            position,
            peak=config.lr,
            total=self.total_optimizer_steps,
            warmup=config.warmup_steps,
            schedule=config.lr_schedule,
        )
        done = self.mini_batch.step(lr)
        self._moved |= done.applied
        self.steps_skipped += done.refused
        return done

    @torch.no_grad()
    def with_old_logprobs(self, batch: PassBatch) -> PassBatch:
        """The pass with the log-probabilities that the mini-batch is learned from, as the weights stand now."""
        batch = batch.to(self.device)
        if self._old_from_rollout:
            return replace(batch, old_logprobs_BT=batch.rollout_logprobs_BT)
        model = self._snapshot if self._moved and self._snapshot is not None else self._scorer
        return replace(batch, old_logprobs_BT=self._score(model, batch).logprobs_BT)

    @torch.no_grad()
    def reference_logprobs(self, batch: PassBatch) -> Tensor:
        """float32 [B, T]: of the output tokens by the reference, at the step's temperature."""
        return self._reference_logprobs(batch.to(self.device))

    @torch.no_grad()
    def logprobs(self, batch: PassBatch) -> Tensor:
        """float32 [B, T] log-probabilities of the output tokens at temperature 1, by the weights as they are now."""
        return self._score(self._scorer, batch.to(self.device)).model_logprobs_BT

    # ---- weights to send

    def named_tensors(self) -> Iterator[NamedTensor]:
        """All weights under their Hugging Face names, tied ones once, in the order of `named_shapes`; each can be
        written until the next optimizer step.

        Shards are put together a bucket at a time; every rank has to go through all of them.
        """
        for name, tensor in self.whole_weights():
            dtype = self._sent_dtype(tensor)
            yield name, safetensors_dtype(dtype), tuple(tensor.shape), writer_of(tensor, dtype)

    def named_shapes(self) -> Iterator[Shaped]:
        """Name, dtype and shape of all that is sent; nothing is put together or merged for it."""
        for name, tensor in self.named_weights():
            sent = merged_name(name) if self.config.lora.rank else name if self.ranks.size == 1 else hf_name(name)
            if sent:
                yield sent, safetensors_dtype(self._sent_dtype(tensor)), tuple(tensor.shape)

    def _sent_dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" and tensor.is_floating_point() else tensor.dtype

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by Hugging Face name, adapters merged; of several ranks the leader alone gets them.

        Shards are put together a bucket at a time (`weights.gather`), so that no device ever holds the whole model.
        """
        if self.config.lora.rank:
            yield from merged_tensors(self.named_weights(), self.model)
        elif self.ranks.size == 1:
            yield from self.named_weights()
        else:
            for name, tensor in gathered(self.named_weights(), keep=self.ranks.leads):
                if tensor is not None:
                    yield name, tensor

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers by the model's own name, tied ones once; of several ranks this one's.

        Those are Hugging Face's names, but where there are adapters.
        """
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def config_json(self) -> str:
        """The model's config.json, with the dtype that is sent."""
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        config["dtype"] = self.dtype
        config["architectures"] = [type(self.model).__name__]
        return json.dumps(config)

    # ---- within

    def _old_logprobs(self, batch: PassBatch, scores: TokenScores) -> Tensor:
        if batch.old_logprobs_BT is not None:
            return batch.old_logprobs_BT
        if self._old_from_rollout:
            return batch.rollout_logprobs_BT
        if self._snapshot is None or not self._moved:
            return scores.logprobs_BT.detach()
        with torch.no_grad():
            return self._score(self._snapshot, batch).logprobs_BT

    def _remember_weights(self) -> None:
        if self._snapshot is None:
            self._snapshot = self._made().requires_grad_(False)
        with torch.no_grad():
            for kept, now in zip(self._snapshot.parameters(), self.model.parameters(), strict=True):
                local(kept).copy_(local(now))

    @torch.no_grad()
    def _reference_logprobs(self, batch: PassBatch) -> Tensor:
        if batch.reference_logprobs_BT is not None:
            return batch.reference_logprobs_BT
        assert not self.config.reference.workers, "the reference's workers have not seen this sample"
        if self.reference is not None:
            return self._score(self.reference, batch).logprobs_BT
        with without_adapters(self.model):
            return self._score(self._scorer, batch).logprobs_BT

    def _reference(self) -> TokenScorer | None:
        """A model of its own, where it is neither elsewhere nor what adapters that are switched off leave."""
        reference = self.config.reference
        here = self.config.kl_coef > 0 and not reference.workers
        if not here or (self.config.lora.rank and not reference.path):
            return None
        folder = Path(reference.path) if reference.path else self.folder
        return self._placed(
            folder,
            lambda model: TokenScorer(model).requires_grad_(False),
            offload=reference.offload or self.config.cpu_offload,
        )

    def _made(self) -> TokenScorer:
        """The model of the run's start, with what it learns by."""

        def learning(model: Any) -> TokenScorer:
            if self.config.lora.rank:
                add_adapters(model, self.config.lora)
            return TokenScorer(model)

        return self._placed(self.folder, learning, offload=self.config.cpu_offload)

    def _placed(self, folder: Path, make: Callable[[Any], TokenScorer], *, offload: bool) -> TokenScorer:
        return load_placed(folder, make, self.ranks, self.device, self.dtype, cpu_offload=offload)

    def _score(self, scorer: TokenScorer, batch: PassBatch, *, entropy_gradient: bool = False) -> TokenScores:
        # Shards are exchanged in bfloat16 already, and layers compute in what they are given.
        whole = self.dtype == "bfloat16" and self.ranks.size == 1
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=whole):
            scores: TokenScores = scorer(batch, self._temperature, entropy_gradient)
        if not torch.is_grad_enabled():
            self.looked_flops += forward_flops(ModelSize.of(scorer.lm), batch)
        return scores


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ConfigError for what is no CPU or CUDA device, or is not there."""
    allowed = "allowed: auto, cpu, cuda, cuda:0, ..."
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device={name!r} is not a device; {allowed}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"train.device={name!r} is not supported; {allowed}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"train.device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device
