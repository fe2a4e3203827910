"""What a balance policy of the user's own may answer: nonsense ends the run in words, before it loses a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from penstock.errors import PolicyError
from penstock.rollout.answers import ask_moves, ask_order, ask_picks
from penstock.rollout.balance import InstanceLoad, Move, PlacedSample, Queue, ShortestQueue

LOADS = [InstanceLoad("one", 1, 4), InstanceLoad("other", 0, 4)]


@dataclass
class Odd(ShortestQueue):
    """Answers as it was told to."""

    answer: tuple[object, ...] = ()

    def assign(self, queue: Queue, loads: Sequence[InstanceLoad]) -> list[int]:
        return list(self.answer)  # type: ignore[arg-type]

    def order(self, output_tokens: Sequence[int], prompts: Sequence[int]) -> list[int]:
        return list(self.answer)  # type: ignore[arg-type]

    def moves(
        self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
    ) -> list[Move]:
        return list(self.answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("picks", "says"),
    [((2,), "picked instance 2; there are 2"), ((0, -1), "picked instance -1"), ((0, 1, 0, 1), "4 picks for 3")],
)
def test_picks_are_of_instances_that_are_there_and_no_more_than_samples_wait(picks: tuple[int, ...], says: str) -> None:
    with pytest.raises(PolicyError, match=rf"test_answers:Odd makes no sense: assign .*{says}"):
        ask_picks(Odd(4, answer=picks), Queue(fresh=2, moved=1), LOADS)
    assert ask_picks(Odd(4, answer=(1, 0)), Queue(fresh=2, moved=1), LOADS) == [1, 0]


@pytest.mark.parametrize("order", [(), (0, 1), (0, 1, 1), (0, 1, 3), (0, 1, 2, 2)])
def test_an_order_has_every_sample_once_so_that_none_is_lost(order: tuple[int, ...]) -> None:
    with pytest.raises(PolicyError, match=r"order gave .* for 3 samples"):
        ask_order(Odd(4, answer=order), [5, 6, 7], [0, 0, 1])
    assert ask_order(Odd(4, answer=(2, 0, 1)), [5, 6, 7], [0, 0, 1]) == [2, 0, 1]


@pytest.mark.parametrize(("source", "target"), [("one", "nobody"), ("nobody", "one"), ("one", "one"), ("nobody", "")])
def test_a_move_is_between_two_instances_that_are_there_or_back_to_wait(source: str, target: str) -> None:
    with pytest.raises(PolicyError, match=f"from '{source}' to '{target}'"):
        ask_moves(Odd(4, answer=(Move(source, 1, target),)), 0, LOADS, lambda name: [])
    fine = [Move("one", 1, "other"), Move("one", 2, "")]
    assert ask_moves(Odd(4, answer=tuple(fine)), 0, LOADS, lambda name: []) == fine


def test_a_weight_of_nothing_is_refused_with_the_class_that_gave_it() -> None:
    class Weightless(ShortestQueue):
        def weight(self, load: InstanceLoad) -> float:
            return 0.0

    with pytest.raises(PolicyError, match=r"Weightless\.weight gave \[0.0, 0.0\]"):
        Weightless(4).assign(Queue(fresh=2), LOADS)
