"""How a run's tokens are drawn: the configuration's words as the wire's.

Decides what evaluation samples like where nothing is said: greedily. Refuses to know who draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.run import RunConfig, SamplingConfig
from penstock.wire import Sampling

__all__ = ["eval_sampling_of", "greedy_of", "sampling_of"]


def sampling_of(config: SamplingConfig, stop_ids: Sequence[int]) -> Sampling:
    """The wire's form of a sampling configuration; `stop_ids` are the tokenizer's own."""
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_ids=tuple(sorted({*stop_ids, *config.stop_token_ids})),
    )


def eval_sampling_of(config: RunConfig, stop_ids: Sequence[int]) -> Sampling:
    """Evaluation's sampling: the configured one, or greedy with training's limit and stop ids."""
    if config.rollout.eval_sampling is not None:
        return sampling_of(config.rollout.eval_sampling, stop_ids)
    return greedy_of(config.rollout.sampling, stop_ids)


def greedy_of(config: SamplingConfig, stop_ids: Sequence[int]) -> Sampling:
    """The likeliest token each time, with a sampling configuration's limit and stop ids."""
    greedy = SamplingConfig(max_new_tokens=config.max_new_tokens, temperature=0.0, stop_token_ids=config.stop_token_ids)
    return sampling_of(greedy, stop_ids)
