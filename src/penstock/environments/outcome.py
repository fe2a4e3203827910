"""The environment's own verdict as the run's reward: `reward.function = "penstock.environments.outcome:outcome"`."""

from __future__ import annotations

from penstock.sample import Sample, Score, Unscored

__all__ = ["outcome"]


def outcome(sample: Sample) -> Score | Unscored:
    """What the environment gave for the conversation, added up over its turns, with its parts."""
    if sample.outcome is None:
        return Unscored("no environment gave a reward; environment.path is not set")
    return sample.outcome
