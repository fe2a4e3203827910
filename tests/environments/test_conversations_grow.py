"""A conversation's columns, and when it is over."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.environments import Conversation, Limits, Observation
from penstock.errors import EnvironmentFault
from penstock.sample import Finish, Score, VersionSpan


def say(talk: Conversation, *token_ids: int, finish: Finish = Finish.STOP, version: int = 3) -> None:
    logprobs = array("f", [-0.5] * len(token_ids))
    talk.say(array("i", token_ids), logprobs, [VersionSpan(version, 0, len(token_ids))], finish)


def test_what_is_said_and_heard_stands_in_one_column_and_only_the_models_own_is_marked() -> None:
    talk = Conversation(Limits(20))
    say(talk, 5, 6, 2)
    assert talk.hear(Observation([7, 8], reward=0.25, parts={"calls": 1.0}))
    say(talk, 9, 2)
    assert not talk.hear(Observation([1, 1, 1], done=True, reward=1.0, parts={"calls": 1.0, "right": 1.0}))
    assert list(talk.token_ids) == [5, 6, 2, 7, 8, 9, 2]
    assert list(talk.learned) == [1, 1, 1, 0, 0, 1, 1]
    assert list(talk.logprobs) == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5]
    assert talk.finish is Finish.STOP
    assert (talk.turns, talk.last_turn) == (2, 5)
    assert talk.outcome == Score(1.25, {"calls": 2.0, "right": 1.0})


def test_spans_say_which_version_drew_and_leave_out_what_nobody_drew() -> None:
    talk = Conversation(Limits(30))
    moved = [VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)]
    talk.say(array("i", [5, 6, 2]), array("f", [0, 0, 0]), moved, Finish.STOP)
    talk.hear(Observation([7, 8]))
    say(talk, 9, 2, version=4)
    assert talk.spans == [VersionSpan(3, 0, 1), VersionSpan(4, 1, 3), VersionSpan(4, 5, 7)]


def test_a_turn_knows_what_is_left_and_whether_it_is_the_last() -> None:
    talk = Conversation(Limits(10, max_turns=3, max_turn_tokens=4))
    assert talk.turn_tokens == 4
    first = talk.say(array("i", [5, 2]), array("f", [0, 0]), [], Finish.STOP)
    assert (first.number, first.tokens_left, first.last) == (0, 8, False)
    talk.hear(Observation([7, 7, 7, 7, 7]))
    assert talk.turn_tokens == 3
    second = talk.say(array("i", [5, 2]), array("f", [0, 0]), [], Finish.STOP)
    assert (second.number, second.tokens_left, second.last) == (1, 1, True)


@pytest.mark.parametrize(
    ("limits", "answer"),
    [(Limits(8, max_turns=1), [7]), (Limits(3), [7]), (Limits(8), [7, 7, 7, 7, 7])],
    ids=["no turn is left", "the answer fills the budget", "the answer is longer than the budget"],
)
def test_a_conversation_that_would_go_on_without_room_is_truncated(limits: Limits, answer: list[int]) -> None:
    talk = Conversation(limits)
    say(talk, 5, 6, 2)
    assert not talk.hear(Observation(answer))
    assert talk.finish is Finish.LENGTH
    assert list(talk.token_ids) == [5, 6, 2], "it ends with the model's own words"


def test_a_turn_that_is_cut_short_ends_its_conversation_and_its_reward_counts() -> None:
    talk = Conversation(Limits(9, max_turn_tokens=3))
    say(talk, 5, 6, 7, finish=Finish.LENGTH)
    assert not talk.hear(Observation([8], reward=0.5))
    assert (talk.finish, talk.outcome.value) == (Finish.LENGTH, 0.5)


def test_an_answer_without_a_token_has_to_end_the_conversation() -> None:
    talk = Conversation(Limits(9))
    say(talk, 5, 2)
    with pytest.raises(EnvironmentFault, match="not done"):
        talk.hear(Observation())


@given(
    limits=st.builds(
        Limits, st.integers(1, 40), max_turns=st.integers(1, 6), max_turn_tokens=st.sampled_from([0, 1, 3, 50])
    ),
    turns=st.lists(st.tuples(st.integers(1, 12), st.booleans(), st.integers(1, 12)), min_size=1),
)
def test_whatever_is_said_no_budget_is_passed_and_the_last_word_is_the_models(
    limits: Limits, turns: list[tuple[int, bool, int]]
) -> None:
    talk = Conversation(limits)
    for said, done, told in turns:
        count = min(said, talk.turn_tokens)
        assert count >= 1
        say(talk, *[5] * count, finish=Finish.LENGTH if count < said else Finish.STOP)
        if not talk.hear(Observation([7] * told, done=done)):
            break
    else:
        return
    assert len(talk.token_ids) == len(talk.logprobs) == len(talk.learned) <= limits.max_new_tokens
    assert talk.turns <= limits.max_turns
    assert talk.learned[-1] == 1
    assert [token == 5 for token in talk.token_ids] == [own == 1 for own in talk.learned]
    assert sum(span.end - span.start for span in talk.spans) == sum(talk.learned)
