"""Every call of a balance policy: a user's own may raise anything and say anything, and that ends the run in words.

An order that leaves a sample out would lose it, and one that goes to an instance that is not there would hang until its
batch's deadline. Decides only what can be followed; manager and simulator ask and tell through it. What can't be
followed, or was raised, is a PolicyError that names the class, the method, and what it said.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Sequence
from operator import index
from pathlib import Path
from typing import Any

from penstock.errors import PolicyError
from penstock.rollout.balance import BalancePolicy, InstanceLoad, Move, PlacedSample, Queue

__all__ = ["ask_fill", "ask_moves", "ask_order", "ask_picks", "fills", "tell"]

SHOWN = 8
"""Of a list in an error's words."""
SHOWN_CHARS = 60


def ask_picks(policy: BalancePolicy, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
    """`policy.assign`. Raises PolicyError for more picks than samples, and for one of no instance."""
    picks = _indices(policy, "assign", _call(policy, "assign", queue, loads))
    if len(picks) > queue.waiting:
        raise _wrong(policy, f"assign gave {len(picks)} picks for {queue.waiting} waiting samples")
    if picks and not (min(picks) >= 0 and max(picks) < len(loads)):
        wrong = next(pick for pick in picks if not 0 <= pick < len(loads))
        raise _wrong(policy, f"assign picked instance {wrong}; there are {len(loads)}, counted from 0")
    return picks


def fills(policy: BalancePolicy) -> bool:
    """Whether it has a `fill` that says what its `assign` would: one that is older than that does not."""
    kinds = type(policy).__mro__
    fill, assign = (
        next((k for k, kind in enumerate(kinds) if name in vars(kind)), len(kinds)) for name in ("fill", "assign")
    )
    # It may have a word of its own by that name.
    return fill <= assign < len(kinds) and callable(getattr(policy, "fill", None))


def ask_fill(policy: BalancePolicy, queue: Queue, load: InstanceLoad) -> int:
    """`policy.fill`, of one that `fills`. Raises PolicyError for no number, and for more than wait."""
    answer = _call(policy, "fill", queue, load)
    try:
        count = index(answer)
    except TypeError:
        raise _wrong(policy, f"fill gave {_shown(answer)}; a number of samples is due") from None
    if not 0 <= count <= queue.waiting:
        raise _wrong(policy, f"fill gave {count} of {queue.waiting} waiting samples")
    return count


def ask_order(policy: BalancePolicy, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
    """`policy.order`. Raises PolicyError where that is not every index once."""
    order, count = _indices(policy, "order", _call(policy, "order", output_tokens, prompts)), len(prompts)
    if len(order) != count or set(order) != set(range(count)):
        raise _wrong(policy, f"order gave {_shown(order)} for {count} samples: each index is due once")
    return order


def ask_moves(
    policy: BalancePolicy,
    waiting: int,
    loads: Sequence[InstanceLoad],
    placed: Callable[[str], Sequence[PlacedSample]],
) -> list[Move]:
    """`policy.moves`. Raises PolicyError for a move from or to an instance that it was not shown, or a look at one."""
    names = {load.instance for load in loads}

    def placed_at(instance: str) -> Sequence[PlacedSample]:
        if instance not in names:
            raise PolicyError(f"moves asked for the samples of {instance!r}; there are {_shown(names)}")
        return placed(instance)

    moves = _call(policy, "moves", waiting, loads, placed_at)
    if not isinstance(moves, (list, tuple)):
        raise _wrong(policy, f"moves gave {_shown(moves)}; a list of moves is due")
    for move in moves:
        if not (isinstance(move, Move) and isinstance(move.source, str) and isinstance(move.target, str)):
            raise _wrong(policy, f"moves gave {_shown(move)}; a Move with the names of two instances is due")
        if move.source not in names or move.target == move.source or (move.target and move.target not in names):
            words = f"moves sent a sample from {move.source!r} to {move.target!r}; there are {_shown(names)}"
            raise _wrong(policy, words)
    return list(moves)


def tell(policy: BalancePolicy, method: str, *told: object) -> None:
    """`policy.report`, `finished`, `batch_ended` or `gone`. Raises PolicyError for whatever that raises."""
    _call(policy, method, *told)


def _call(policy: BalancePolicy, method: str, *told: object) -> Any:
    try:
        return getattr(policy, method)(*told)
    except PolicyError as error:
        raise _wrong(policy, str(error)) from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise PolicyError(
            f"the balance policy {_name(policy)} failed in {method}: {type(error).__name__}: {error} "
            f"({Path(where.filename).name}, line {where.lineno})"
        ) from error


def _indices(policy: BalancePolicy, method: str, answer: Any) -> list[int]:
    """An answer that is a list of whole numbers, of whatever kind."""
    if isinstance(answer, (list, tuple)):
        try:
            return list(map(index, answer))
        except TypeError:
            pass
    raise _wrong(policy, f"{method} gave {_shown(answer)}; a list of indices is due")


def _shown(answer: Any) -> str:
    """Whatever a policy said, in few words."""
    if isinstance(answer, Collection) and not isinstance(answer, (str, bytes)):
        rows = list(answer)
        words = "[" + ", ".join(map(repr, rows[:SHOWN]))[:SHOWN_CHARS]
        return words + (", ...]" if len(rows) > SHOWN or len(words) > SHOWN_CHARS else "]")
    return repr(answer)[:SHOWN_CHARS]


def _name(policy: BalancePolicy) -> str:
    kind = type(policy)
    return f"{kind.__module__}:{kind.__qualname__}"


def _wrong(policy: BalancePolicy, words: str) -> PolicyError:
    return PolicyError(f"the balance policy {_name(policy)} makes no sense: {words}")
