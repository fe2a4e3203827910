"""A balance policy's answers, taken only where they make sense: a user's own may say anything.

An order that leaves a sample out would lose it, and one that goes to an instance that is not there would hang until its
batch's deadline. Both end the run at once, in words. Decides nothing else; manager and simulator ask through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import PolicyError
from penstock.rollout.balance import BalancePolicy, InstanceLoad, Move, PlacedSample, Queue

__all__ = ["ask_moves", "ask_order", "ask_picks"]


def ask_picks(policy: BalancePolicy, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
    """`policy.assign`. Raises PolicyError for more picks than samples, and for one of no instance."""
    picks = policy.assign(queue, loads)
    if len(picks) > queue.waiting:
        raise _wrong(policy, f"assign gave {len(picks)} picks for {queue.waiting} waiting samples")
    if picks and not (min(picks) >= 0 and max(picks) < len(loads)):
        wrong = next(pick for pick in picks if not 0 <= pick < len(loads))
        raise _wrong(policy, f"assign picked instance {wrong}; there are {len(loads)}, counted from 0")
    return picks


def ask_order(policy: BalancePolicy, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """`policy.order`. Raises PolicyError where that is not every index once."""
    order, count = policy.order(output_tokens, prompts), len(prompts)
    if len(order) != count or set(order) != set(range(count)):
        raise _wrong(policy, f"order gave {str(list(order[:8]))[:60]}... for {count} samples: each index is due once")
    return order


def ask_moves(
    policy: BalancePolicy,
    waiting: int,
    loads: Sequence[InstanceLoad],
    placed: Callable[[str], Sequence[PlacedSample]],
) -> list[Move]:
    """`policy.moves`. Raises PolicyError for a move from or to an instance that it was not shown."""
    moves = policy.moves(waiting, loads, placed)
    if moves:
        names = {load.instance for load in loads}
        for move in moves:
            if move.source not in names or move.target == move.source or (move.target and move.target not in names):
                raise _wrong(policy, f"moves sent a sample from {move.source!r} to {move.target!r}; there are {names}")
    return moves


def _wrong(policy: BalancePolicy, words: str) -> PolicyError:
    kind = type(policy)
    return PolicyError(f"the balance policy {kind.__module__}:{kind.__qualname__} makes no sense: {words}")
