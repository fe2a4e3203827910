from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reward.crossing import LENGTH, Done, decode_job, decode_reply, encode, job_of, sample_of
from penstock.sample import Sample, Score, Unscored

KEYS = st.text(max_size=8) | st.integers(-(2**80), 2**80) | st.tuples(st.integers(0, 9), st.integers(0, 9))
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.datetimes() | st.datetimes(timezones=st.just(datetime.UTC)) | st.dates() | st.times()
    | st.decimals(allow_nan=False) | st.frozensets(st.integers())
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)


def there_and_back(sample: Sample) -> Sample:
    message = job_of(1, sample)
    assert LENGTH.unpack_from(message)[0] == len(message) - LENGTH.size
    return sample_of(decode_job(message[LENGTH.size :]))


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_sample_crosses_whole(make_sample: Callable[..., Sample]) -> None:
    sample = make_sample("the response ✓", replica=5, answer="42", metadata={"grid": ((1, 2), (3, 4))})
    back = there_and_back(sample)
    assert list(back.prompt.token_ids) == list(sample.prompt.token_ids)
    back.prompt = sample.prompt
    assert back == sample


def test_a_conversation_crosses_whole(make_sample: Callable[..., Sample]) -> None:
    sample = make_sample(answer="42")
    sample.learned = array("b", [0, *[1] * (len(sample.token_ids) - 1)])
    sample.turns, sample.transcript = 2, "<tool>6*7</tool>42"
    sample.outcome = Score(1.0, {"calls": 1.0})
    back = there_and_back(sample)
    back.prompt = sample.prompt
    assert back == sample


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=4))
def test_rows_keep_their_values_and_types(row: dict[str, Any]) -> None:
    from array import array

    from penstock.sample import Finish, Prompt, SampleId

    sample = Sample(
        SampleId("b", 0, 0), Prompt(0, "q", [1], row, "file:1"), array("i"), array("f"), (), Finish.LENGTH, ""
    )
    assert same(dict(there_and_back(sample).row), row)


def test_numpy_scalars_arrive_as_plain_ones(make_sample: Callable[..., Sample]) -> None:
    numpy = pytest.importorskip("numpy")
    row = {"a": numpy.float64(0.5), "b": numpy.str_("x"), "c": numpy.int32(3), "d": numpy.bool_(True)}
    assert same(dict(there_and_back(make_sample(**row)).row), {"a": 0.5, "b": "x", "c": 3, "d": True})


@pytest.mark.parametrize("value", [object(), 1j, fractions.Fraction(1, 3), len, decimal.Context()])
def test_a_value_that_cannot_cross_is_refused_with_its_field(make_sample: Callable[..., Sample], value: object) -> None:
    with pytest.raises(ValueError, match=r"questions.jsonl:8 can't be sent to a worker: its field 'odd': .*type"):
        job_of(1, make_sample(answer="42", odd=[{"deep": value}]))


def test_a_row_that_holds_itself_is_refused(make_sample: Callable[..., Sample]) -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="its field 'endless': nested too deeply"):
        job_of(1, make_sample(endless=endless))


def test_results_cross() -> None:
    for done, result in [
        (Done(3, 0.5, {"raw": 0.25}), Score(0.5, {"raw": 0.25})),
        (Done(3, cause="ValueError"), Unscored("ValueError")),
        (Done(3, cause=""), Unscored("")),
    ]:
        back = decode_reply(encode(done)[LENGTH.size :])
        assert isinstance(back, Done)
        assert back.result() == result


def test_subclasses_arrive_as_what_they_stand_for(make_sample: Callable[..., Sample]) -> None:
    class Colour(str, enum.Enum):  # noqa: UP042  # whose str() is not its value
        RED = "red"

    row = {"a": Colour.RED, "b": enum.IntEnum("Size", "SMALL").SMALL, "c": collections.OrderedDict(x=1)}
    assert same(dict(there_and_back(make_sample(**row)).row), {"a": "red", "b": 1, "c": {"x": 1}})
