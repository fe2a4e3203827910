"""A run's own reward model: its workers, the threads that wait for them, and the scorer that the loop sees.

Wires `cluster`, `reward` and `train` together and decides nothing that they decide.
"""

from __future__ import annotations

import contextlib

from penstock.cluster import Cluster
from penstock.config.run import RunConfig
from penstock.errors import RewardError
from penstock.reward.worker_scorer import WorkerScorer
from penstock.train.edge import EdgeLoop
from penstock.train.reward_model import open_reward_model

__all__ = ["open_model_scorer"]


def open_model_scorer(config: RunConfig, edge: EdgeLoop, parts: contextlib.ExitStack) -> WorkerScorer:
    """Starts the workers of `reward.model`, which `parts` ends, and has them score a text. Raises RewardError."""
    reward, model = config.reward, config.reward.model
    threads = config.cluster.execute_threads
    if config.cluster.execute_mode == "rank_zero" and model.workers > 1:
        raise RewardError(
            f'cluster.execute_mode="rank_zero" leaves {model.workers - 1} of the reward model\'s workers without work; '
            "set reward.model.workers = 1, or another mode"
        )
    cluster = parts.enter_context(Cluster(config.cluster.execute_mode, threads, threads))
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
