from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.reward.faults import MOST_FAULTS, FaultLog, Faults, cause_of, place_of
from penstock.reward.functions import load_function
from penstock.sample import Sample


def raised(function: Callable[..., object]) -> Exception:
    with pytest.raises(Exception) as caught:  # any: the caller says which it expects
        function()
    # The frame that caught it is the caller's, as in the scorer.
    assert caught.value.__traceback__ is not None
    return caught.value


def code(text: str, path: Path) -> Callable[..., object]:
    path.write_text(text.replace("f()", "f(sample=None)"))
    return load_function(f"{path}:f").call


def test_the_place_is_the_users_line_and_not_that_of_the_library_it_called(tmp_path: Path) -> None:
    function = code("import json\ndef f():\n    return json.loads('{')\n", tmp_path / "my_reward.py")
    error = raised(function)
    assert place_of(error) == "my_reward.py:3"
    assert cause_of(error).endswith("(my_reward.py:3)")


def test_where_only_a_library_ran_its_line_is_the_place() -> None:
    assert place_of(raised(lambda: json.loads("{"))).startswith("test_faults.py:")
    error = raised(lambda: json.loads("{"))
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # as if the library had been called by the scorer
    assert place_of(error).startswith("decoder.py:")


def test_an_error_of_the_call_itself_has_no_place() -> None:
    with pytest.raises(TypeError) as caught:
        len(3)  # type: ignore[arg-type]
    assert place_of(caught.value) == ""
    assert cause_of(caught.value) == "TypeError: object of type 'int' has no len()"
    assert cause_of(ValueError("never raised")) == "ValueError: never raised"


def test_a_fault_is_told_once_whatever_its_message(make_sample: Callable[..., Sample], tmp_path: Path) -> None:
    faults = Faults()
    told = []
    function = code("def f(sample):\n    raise KeyError(sample)\n", tmp_path / "r.py")
    for number in range(3):
        error = raised(partial(function, number))
        told.append(faults.take(error, make_sample()))
    assert [cause for cause, _, _ in told] == [f"KeyError: {number} (r.py:2)" for number in range(3)]
    assert [bool(text) for _, _, text in told] == [True, False, False]


def test_no_more_than_a_bounded_number_of_faults_is_told() -> None:
    faults = Faults()
    assert sum(faults.is_fresh(f"E at r.py:{line}") for line in range(1000)) == MOST_FAULTS


def test_two_workers_with_the_same_fault_have_one_entry(tmp_path: Path) -> None:
    log = FaultLog(tmp_path / "reward.log")
    log.take("ValueError at r.py:2", "one\n")
    log.take("ValueError at r.py:2", "again\n")
    assert (tmp_path / "reward.log").read_text() == "one\n"


@pytest.mark.parametrize("name", ["", "nowhere/reward.log"])
def test_without_a_file_to_write_the_traceback_goes_to_the_logger(
    make_sample: Callable[..., Sample], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    log = FaultLog(tmp_path / name if name else None)
    with caplog.at_level(logging.WARNING, "penstock.reward"):
        log.cause(raised(code("def f():\n    raise ValueError(7)\n", tmp_path / "r.py")), make_sample())
    assert "ValueError: 7" in caplog.text
    assert ("can't be written" in caplog.text) == bool(name)
