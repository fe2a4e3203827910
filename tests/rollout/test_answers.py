"""What a balance policy of the user's own may answer: nonsense ends the run in words, before it loses a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.errors import PolicyError
from penstock.rollout.answers import ask_moves, ask_order, ask_picks, tell
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

    with pytest.raises(PolicyError, match=r"makes no sense: .*Weightless\.weight gave \[0.0, 0.0\]"):
        ask_picks(Weightless(4), Queue(fresh=2), LOADS)


@dataclass
class Sized(ShortestQueue):
    """Weights, rooms and handicaps of any kind."""

    of_weight: Any = 1.0
    of_room: Any = 4
    of_handicap: Any = 0.0

    def weight(self, load: InstanceLoad) -> float:
        return self.of_weight  # type: ignore[no-any-return]

    def room(self, load: InstanceLoad) -> int:
        return self.of_room  # type: ignore[no-any-return]

    def handicap(self, load: InstanceLoad) -> float:
        return self.of_handicap  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Sized(4, of_weight="x"), r"Sized\.weight gave \['x', 'x'\]; each must be above 0"),
        (Sized(4, of_weight=None), r"Sized\.weight gave \[None, None\]"),
        (Sized(4, of_weight=float("nan")), r"Sized\.weight gave \[nan, nan\]"),
        (Sized(4, of_weight=float("inf")), r"Sized\.weight gave \[inf, inf\]"),
        (Sized(4, of_weight=-1), r"Sized\.weight gave \[-1, -1\]"),
        (Sized(4, of_room="x"), r"Sized\.room gave \['x', 'x'\]"),
        (Sized(4, of_room=float("nan")), r"Sized\.room gave \[nan, nan\]; each must be a number"),
        (Sized(4, of_handicap="x"), r"Sized\.handicap gave \['x', 'x'\]; each must be a finite number"),
        (Sized(4, of_handicap=float("nan")), r"Sized\.handicap gave \[nan, nan\]"),
        (Sized(4, of_handicap=float("inf")), r"Sized\.handicap gave \[inf, inf\]"),
    ],
)
def test_weights_rooms_and_handicaps_are_numbers(policy: ShortestQueue, says: str) -> None:
    with pytest.raises(PolicyError, match=rf"the balance policy test_answers:Sized .*{says}"):
        ask_picks(policy, Queue(fresh=2), LOADS)
    if "weight" in says:
        with pytest.raises(PolicyError, match=says):
            ask_picks(policy, Queue(fresh=1, near=0), LOADS)


@dataclass
class Says(ShortestQueue):
    """Answers anything at all."""

    answer: Any = None

    def _any(self, *_asked: object) -> Any:
        return self.answer

    assign = order = moves = _any


@pytest.mark.parametrize("answer", [None, 3, "ab", ["a"], [1.5], [None], {0: 1}, range(1)])
def test_indices_come_as_a_list_of_whole_numbers(answer: Any) -> None:
    policy = Says(4, answer=answer)
    with pytest.raises(
        PolicyError, match=r"test_answers:Says makes no sense: assign gave .*; a list of indices is due"
    ):
        ask_picks(policy, Queue(fresh=3), LOADS)
    with pytest.raises(PolicyError, match=r"test_answers:Says makes no sense: order gave .*; a list of indices is due"):
        ask_order(policy, [5], [0])


@pytest.mark.parametrize("answer", [None, "one", iter(()), [None], [("one", 1, "other")], [Move("one", 1, None)]])  # type: ignore[arg-type]
def test_moves_come_as_a_list_of_moves(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"test_answers:Says makes no sense: moves gave .* is due"):
        ask_moves(Says(4, answer=answer), 0, LOADS, lambda name: [])


def test_samples_are_shown_of_instances_that_are_there() -> None:
    @dataclass
    class Curious(ShortestQueue):
        wanted: str = "one"

        def moves(
            self, waiting: int, loads: Sequence[InstanceLoad], placed: Callable[[str], Sequence[PlacedSample]]
        ) -> list[Move]:
            return [Move("one", sample.lease, "other") for sample in placed(self.wanted)]

    rows = {"one": [PlacedSample(7, 1, 2, True)]}
    assert ask_moves(Curious(4), 0, LOADS, rows.__getitem__) == [Move("one", 7, "other")]
    with pytest.raises(PolicyError, match=r"Curious makes no sense: moves asked for the samples of 'nobody'"):
        ask_moves(Curious(4, wanted="nobody"), 0, LOADS, rows.__getitem__)


@pytest.mark.parametrize("method", ["assign", "order", "moves", "report", "finished", "batch_ended", "gone"])
def test_whatever_a_policy_raises_is_told_with_its_class_method_and_line(method: str) -> None:
    def broken(*_told: object) -> None:
        raise ValueError("boom")

    policy = ShortestQueue(4)
    setattr(policy, method, broken)
    calls: dict[str, Callable[[], object]] = {
        "assign": lambda: ask_picks(policy, Queue(fresh=2), LOADS),
        "order": lambda: ask_order(policy, [5], [0]),
        "moves": lambda: ask_moves(policy, 0, LOADS, lambda name: []),
    }
    says = rf"ShortestQueue failed in {method}: ValueError: boom \(test_answers\.py, line \d+\)"
    with pytest.raises(PolicyError, match=says) as caught:
        calls.get(method, lambda: tell(policy, method))()
    assert isinstance(caught.value.__cause__, ValueError)
