"""Rewards: what a reward function is, and how it is called so that nothing it does can stop a run.

Kept light: worker processes import this package when they start. What belongs to the compute pool (and brings aiohttp
with it) is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from penstock.reward.functions import RewardFunction, load_function, normalise
from penstock.reward.options import factory
from penstock.reward.scorer import Scorer
from penstock.sample import Sample, Score, Unscored

if TYPE_CHECKING:
    from penstock.reward.accelerated import accelerate
    from penstock.reward.batching import batched, pool_batched
    from penstock.reward.cache import AnswerCache
    from penstock.reward.calling import reload_functions
    from penstock.reward.composed import compose, score_batch
    from penstock.reward.limits import Endpoint, PoolOptions, load_pool
    from penstock.reward.local import ProcessTransport, SandboxTransport
    from penstock.reward.pool import ComputePool
    from penstock.reward.retry import Kind
    from penstock.reward.sandbox import Limits, Sandbox
    from penstock.reward.transport import FunctionTransport, HttpTransport

__all__ = [
    "AnswerCache",
    "ComputePool",
    "Endpoint",
    "FunctionTransport",
    "HttpTransport",
    "Kind",
    "Limits",
    "PoolOptions",
    "ProcessTransport",
    "RewardFunction",
    "Sample",
    "Sandbox",
    "SandboxTransport",
    "Score",
    "Scorer",
    "Unscored",
    "accelerate",
    "batched",
    "compose",
    "factory",
    "load_function",
    "load_pool",
    "normalise",
    "pool_batched",
    "reload_functions",
    "score_batch",
]

_LAZY = {
    "AnswerCache": "cache",
    "ComputePool": "pool",
    "Endpoint": "limits",
    "FunctionTransport": "transport",
    "HttpTransport": "transport",
    "Kind": "retry",
    "Limits": "sandbox",
    "PoolOptions": "limits",
    "ProcessTransport": "local",
    "Sandbox": "sandbox",
    "SandboxTransport": "local",
    "accelerate": "accelerated",
    "batched": "batching",
    "compose": "composed",
    "pool_batched": "batching",
    "reload_functions": "calling",
    "score_batch": "composed",
    "load_pool": "limits",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"penstock.reward.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'penstock.reward' has no attribute '{name}'")
