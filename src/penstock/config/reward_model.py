"""What a run's own reward model is, and where it runs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.config.section import Section


class RewardModelConfig(Section):
    """A Hugging Face model that scores the training samples, on workers of the run (docs/rewards.md)."""

    path: str = ""
    """The model's folder; empty: there is none, and `reward.function` scores. With one, `reward.function` scores the
    held-out answers alone, unless there is an `eval_function`."""
    kind: Literal["classifier", "yes_token"] = "classifier"
    """`classifier`: the logit of one label of a sequence classifier. `yes_token`: a causal LM's probability that the
    token after the text is `yes` rather than `no`."""
    label: int | None = Field(default=None, ge=0)
    """classifier: which label's logit; needed unless it has one."""
    yes: str = "Yes"
    no: str = "No"
    """yes_token: the two words, one token each."""
    text: str = "{prompt}{response}"
    """What the model reads: a template with {prompt}, {response} and {row.FIELD}. No chat template is applied."""
    scale: float = 1.0
    offset: float = 0.0
    """The reward is scale * value + offset."""
    workers: int = Field(default=1, ge=1)
    """Processes of this machine; with `reward.mode="ray"`, actors on Ray."""
    gpus_per_worker: float = Field(default=0.0, ge=0)
    """Ray: GPUs that each worker is given."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, or `auto`: the GPUs in turn, where there are any."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """`auto`: as the folder has it."""
    tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Most padded tokens in one forward pass of a worker."""
    samples_per_call: int = Field(default=256, ge=1)
    """Most samples in one call of the workers. A call ends at `reward.timeout_s`; its workers are then replaced."""
