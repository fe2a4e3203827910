"""How a run learns: the trainer's part of its configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.names import ADVANTAGES, LOSSES, known_name
from penstock.config.reference import ReferenceConfig
from penstock.config.section import Section

__all__ = ["CriticConfig", "LoraConfig", "TrainConfig"]


class CriticConfig(Section):
    """The critic that `train.advantage="gae"` learns beside the actor."""

    path: str = ""
    """A model folder for its backbone; by default it begins as the run's model."""
    lr: float = Field(default=1e-5, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    clip: float = Field(default=0.5, ge=0)
    """How far a value may move within a mini-batch before its loss is bounded; 0 sets no bound."""
    alone_steps: int = Field(default=0, ge=0)
    """Steps at the run's start in which the critic learns and the actor waits."""


class LoraConfig(Section):
    """Low-rank adapters (the lora extra): they alone are learned, and merged into the weights that are sent."""

    rank: int = Field(default=0, ge=0)
    """0: all weights are learned."""
    alpha: float = Field(default=16.0, gt=0)
    """What adapters add is multiplied by alpha / rank."""
    targets: list[str] = ["all-linear"]
    """Names of the layers that get one, e.g. q_proj; by default all linear ones but the head."""


def samples_ahead(min_samples_per_micro_batch: int) -> int:
    """A quarter of a micro-batch: fewer would pass one by one, and keep a group that comes meanwhile as long."""
    return -(-min_samples_per_micro_batch // 4)


class TrainConfig(Section):
    steps: int = Field(default=100, ge=1)
    lr: float = Field(default=1e-6, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = Field(default=1.0, gt=0)
    mini_batches_per_step: int = Field(default=1, ge=1)
    """Mini-batches of a step, each with its optimizer steps; prompts_per_step must be divisible by it."""
    epochs: int = Field(default=1, ge=1)
    """Times that a mini-batch is learned from, with an optimizer step each; the first streams."""
    tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Most padded tokens (prompt and output) in one forward and backward pass."""
    min_samples_per_micro_batch: int = Field(default=64, ge=1)
    """A micro-batch is formed once so many samples of complete groups are ready; the step's rest is taken whole."""
    streaming: bool = True
    """Train on complete groups while other rollouts still run; false waits for all rollouts first."""
    advantage: str = "grpo"
    """Advantage estimator: grpo, grpo_passk, dr_grpo, rloo, opo and remax stream; gae (with a critic), gdpo, gpg,
    reinforce_plus_plus and reinforce_plus_plus_baseline wait for a whole mini-batch. Or the import path
    (`package.module:function`) of your own."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """gae, reinforce_plus_plus: discount of a reward one token later."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    gdpo_parts: dict[str, float] = {}
    """gdpo: the reward parts that are normalised each for itself, and their weights."""
    critic: CriticConfig = CriticConfig()
    skip_groups_without_signal: bool = True
    """Leave groups whose advantages are all 0 (rewards all equal) out of the passes and out of the mini-batch's
    denominator, so that the mean is over what can be learnt from; metrics count them all the same. Ignored where
    kl_coef or entropy_coef is above 0, which learn from every group: then all are in the passes and the denominator."""
    loss: str = "ppo_clip"
    """Policy loss: ppo_clip, gspo, cispo, geo_mean, sapo, gpg, dppo_tv, dppo_kl, clip_cov, kl_cov, or the import path
    (`package.module:function`) of your own."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """How far the ratio may fall below 1; of geo_mean its logarithm, of dppo_tv and dppo_kl their distance."""
    clip_high: float = Field(default=0.2, ge=0)
    clip_dual: float = Field(default=0.0, ge=0)
    """ppo_clip: bound on the ratio of tokens with a negative advantage (3 in verl); 0 sets none."""
    ratio_cap: float = Field(default=20.0, gt=1)
    """dppo_tv and dppo_kl: bound on the ratio that weighs a token."""
    sapo_tau_positive: float = Field(default=1.0, gt=0)
    sapo_tau_negative: float = Field(default=1.05, gt=0)
    """sapo: how soft its gate is, for tokens with a positive and with another advantage."""
    cov_share: float = Field(default=0.0002, gt=0, le=1)
    """clip_cov, kl_cov: share of a pass's tokens that are held back for their covariance."""
    cov_low: float = 1.0
    cov_high: float = 5.0
    """clip_cov: bounds of the covariance of the tokens that may be left out."""
    cov_kl_coef: float = Field(default=1.0, ge=0)
    """kl_cov: weight of |log r| on the tokens that are held back."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
    ] = "token-mean"
    """Over the mini-batch; exact however it is split into micro-batches."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the reference (the model at the run's start)."""
    reference: ReferenceConfig = ReferenceConfig()
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether it is a term of the loss, or taken from each token's reward before advantages are made."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"
    """With a "+" the gradient is k2's, whose expectation is the divergence's own."""
    kl_target: float = Field(default=0.0, ge=0)
    """Divergence per token that kl_coef is steered to after each step; 0 leaves it fixed."""
    kl_horizon_samples: int = Field(default=10000, ge=1)
    """How slowly: samples after which kl_coef has moved by at most a fifth."""
    entropy_coef: float = Field(default=0.0, ge=0)
    old_logprobs: Literal["auto", "rollout", "recompute"] = "auto"
    """Denominator of the ratio: the engine's own log-probabilities (`rollout`: only at temperature 1, which they are
    of), or those of the step's first weights (`recompute`). `auto` takes the engine's where they can be used."""
    look_ahead: bool = True
    """While no group is whole, the passes that need none are made of samples that are there: old and reference
    log-probabilities, values. What is learned is the same. Nothing to do where a run has no such passes."""
    rollout_correction: Literal["off", "token", "sequence"] = "off"
    """Weighs each token's loss by trainer's over engine's probability, of the token or of its whole answer (truncated
    importance sampling). For old_logprobs="recompute" at temperature 1."""
    rollout_correction_cap: float = Field(default=2.0, gt=0)
    """Bound on that weight."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`. Ranks that torchrun starts take the device of their local rank."""
    lora: LoraConfig = LoraConfig()
    activation_checkpointing: bool = False
    """Makes activations again in the backward pass rather than keep them: less memory, a third more computation."""
    cpu_offload: bool = False
    """Of several ranks: shards and optimizer stay in host memory."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the trainer; 0 leaves PyTorch's choice."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """What one of the trainer's devices can do, for MFU; 0: known by its name, or measured once."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Steps between checkpoints; 0 writes only the last, and a run that breaks off can then not go on."""
    keep_checkpoints: int = Field(default=2, ge=1)
    checkpoint_timeout_s: float = Field(default=1800, gt=0)
    """A checkpoint is written while the run goes on. The next one, and the run's end, wait for it so long since it
    began; then it counts as failed."""

    @property
    def samples_ahead(self) -> int:
        """Samples that a look ahead is at, at least."""
        return samples_ahead(self.min_samples_per_micro_batch)

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, name: str) -> str:
        return known_name("train.advantage", name, ADVANTAGES)

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return known_name("train.loss", name, LOSSES)

    @model_validator(mode="after")
    def _bounds_make_sense(self) -> TrainConfig:
        if 0 < self.clip_dual <= 1:
            raise ValueError("train.clip_dual must be above 1, or 0 for none")
        if self.kl_coef == 0 and (self.kl_in == "reward" or self.kl_target):
            raise ValueError("train.kl_in and train.kl_target need a train.kl_coef above 0")
        if self.kl_coef == 0 and (self.reference.workers or self.reference.path):
            raise ValueError("train.reference needs a train.kl_coef above 0: nothing else asks for the reference")
        if self.rollout_correction != "off" and self.old_logprobs != "recompute":
            raise ValueError(
                'train.rollout_correction needs train.old_logprobs="recompute": where the engine\'s log-probabilities '
                "are the ratio's denominator, the ratio corrects for them already"
            )
        if self.cov_low >= self.cov_high:
            raise ValueError("train.cov_low must be below train.cov_high")
        return self
