"""What learns in a run, made on every rank alike: from a model folder and, where it goes on, a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock import collector
from penstock.config.run import RunConfig
from penstock.train.actor import Actor
from penstock.train.advantages import get_advantage
from penstock.train.checkpoint import load_checkpoint
from penstock.train.critic import Critic
from penstock.train.learner import Follower, Learner
from penstock.train.ranks import Ranks, Start

__all__ = ["follow", "make_learner"]


def make_learner(config: RunConfig, base: Path, checkpoint: Path | None, ranks: Ranks) -> tuple[Learner, int]:
    """Actor and the critic that its advantages ask for, and the step that comes next.

    The leader has the other ranks make theirs. Raises CheckpointError and ConfigError.
    """
    ranks.tell(Start(str(base.resolve()), str(checkpoint.resolve()) if checkpoint else ""))
    train = config.train
    shared: dict[str, Any] = {
        "total_optimizer_steps": train.steps * train.mini_batches_per_step * train.epochs,
        "horizon_tokens": config.rollout.sampling.max_new_tokens,
        "dtype": config.model.dtype,
        "ranks": ranks,
    }
    actor = Actor(base, train, **shared)
    critic = None
    if get_advantage(train.advantage).has_critic:
        critic = Critic(Path(train.critic.path) if train.critic.path else base, train, **shared)
    step = load_checkpoint(checkpoint, actor, critic).step if checkpoint else 0
    return Learner(config, actor, critic, ranks), step


def follow(config: RunConfig, ranks: Ranks) -> None:
    """The life of a rank that does not lead: returns when the leader has ended the run, or never began it."""
    order = ranks.heard()
    if isinstance(order, Start):
        learner, _ = make_learner(
            config, Path(order.folder), Path(order.checkpoint) if order.checkpoint else None, ranks
        )
        collector.settle()
        Follower(learner).run()
