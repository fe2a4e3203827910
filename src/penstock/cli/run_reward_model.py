"""A run's own reward model and reference: their workers, the threads that wait for them, and the scorers that the
loop sees.

Wires `cluster`, `reward` and `train` together and decides nothing that they decide.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from penstock.cluster import Cluster
from penstock.config.run import RunConfig
from penstock.errors import RewardError
from penstock.reward.worker_scorer import WorkerScorer
from penstock.train.edge import EdgeLoop
from penstock.train.ports import SampleScorer
from penstock.train.reference import ReferenceScorer, open_reference
from penstock.train.reward_model import open_reward_model

__all__ = ["open_model_scorer", "open_reference_scorer"]


def open_model_scorer(config: RunConfig, edge: EdgeLoop, parts: contextlib.ExitStack) -> WorkerScorer:
    """Starts the workers of `reward.model`, which `parts` ends, and has them score a text. Raises RewardError."""
    reward, model = config.reward, config.reward.model
    cluster = _cluster(config, parts, model.workers, "the reward model's", "reward.model.workers")
    scorer = WorkerScorer(
        lambda: open_reward_model(cluster, model, on_ray=reward.mode == "ray"),
        cluster.reward_pool,
        text=model.text,
        scale=model.scale,
        offset=model.offset,
        samples_per_call=model.samples_per_call,
        timeout_s=reward.timeout_s,
    )
    edge.run(scorer.start(), f"loading the reward model {model.path}", reward.load_timeout_s)
    return scorer


def open_reference_scorer(
    config: RunConfig, base: Path, scorer: SampleScorer, edge: EdgeLoop, parts: contextlib.ExitStack
) -> ReferenceScorer:
    """Starts the workers of `train.reference`, which `parts` ends, beside `scorer`. `base`: the model the run begins
    with. Raises RewardError."""
    own = config.train.reference
    cluster = _cluster(config, parts, own.workers, "the reference's", "train.reference.workers")
    arguments = {
        "path": own.path or str(base),
        "device": own.device,
        "dtype": config.model.dtype,
        "temperature": config.rollout.sampling.temperature,
        "tokens_per_micro_batch": config.train.tokens_per_micro_batch,
    }
    opened = ReferenceScorer(
        scorer,
        lambda: open_reference(cluster, own, **arguments),
        cluster.reward_pool,
        samples_per_call=own.samples_per_call,
        timeout_s=own.timeout_s,
    )
    edge.run(opened.start(), f"loading the reference {arguments['path']}", config.reward.load_timeout_s)
    return opened


def _cluster(config: RunConfig, parts: contextlib.ExitStack, workers: int, whose: str, key: str) -> Cluster:
    threads = config.cluster.execute_threads
    if config.cluster.execute_mode == "rank_zero" and workers > 1:
        raise RewardError(
            f'cluster.execute_mode="rank_zero" leaves {workers - 1} of {whose} workers without work; '
            f"set {key} = 1, or another mode"
        )
    return parts.enter_context(Cluster(config.cluster.execute_mode, threads, threads))
