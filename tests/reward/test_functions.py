from __future__ import annotations

import decimal
import fractions
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import RewardError
from penstock.reward import Sample, Score, Unscored, load_function, normalise
from penstock.reward.functions import CAUSE_CHARACTERS, describe_exception


def test_a_function_is_loaded_by_import_path(make_sample: Callable[..., Sample]) -> None:
    loaded = load_function("penstock.reward.verifiers:exact_match")
    assert not loaded.is_async
    assert loaded.call(make_sample("42")) == Score(1.0)


def test_a_function_is_loaded_from_a_file(function: Callable[[str], str], make_sample: Callable[..., Sample]) -> None:
    assert load_function(function("right")).call(make_sample("42")) == 1.0


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path, make_sample: Callable[..., Sample]) -> None:
    (tmp_path / "penstock_test_helper.py").write_text("def half(): return 0.5\n")
    (tmp_path / "mine.py").write_text("from penstock_test_helper import half\ndef reward(sample): return half()\n")
    assert load_function(f"{tmp_path}/mine.py:reward").call(make_sample()) == 0.5


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "penstock_test_rewards.py").write_text("def reward(sample): return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load_function("penstock_test_rewards:reward").call(None) == 1
    assert load_function("./penstock_test_rewards.py:reward").call(None) == 1


@pytest.mark.parametrize(
    ("name", "is_async"),
    [("right", False), ("right_later", True), ("right_by_coroutine", False), ("judge", True), ("judge.method", False)],
)
def test_async_functions_and_async_callable_objects_are_told_apart(
    function: Callable[[str], str], name: str, is_async: bool
) -> None:
    assert load_function(function(name)).is_async is is_async


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("penstock.reward.verifiers", r"must be 'package.module:function'"),
        (":f", r"must be 'package.module:function'"),
        ("os:", r"must be 'package.module:function'"),
        ("no_such_package.rewards:f", r"no module 'no_such_package'"),
        ("penstock.no_such_room:f", r"no module 'penstock.no_such_room'"),
        (".relative:f", r"not a module's name"),
        ("penstock.reward.verifiers:exact_mach", r"has no 'exact_mach'; its functions are .*exact_match"),
        ("./no_such_file.py:f", r"there is no file .*no_such_file.py"),
    ],
)
def test_a_path_that_names_nothing_is_refused_with_the_reason(path: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_function(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_number", "is int, which can't be called"),
        ("Judge", "is a class"),
        ("Judge.two", r"parameters \(sample.*other.*called with one sample"),
        ("no_parameters", r"parameters \(\)"),
        ("judge.missing", "has no 'judge.missing'"),
    ],
)
def test_what_is_no_reward_function_is_refused(function: Callable[[str], str], name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_function(function(name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_dependency", "no_such_dependency"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_fails_to_run_is_refused_with_the_cause(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(RewardError, match=message):
        load_function(f"{tmp_path}/broken.py:f")


def test_a_module_that_misses_a_dependency_is_told_from_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "penstock_test_needy.py").write_text("import no_such_dependency\n")
    (tmp_path / "penstock_test_failing.py").write_text("raise OSError('no disk')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match="imports 'no_such_dependency', which is not installed"):
        load_function("penstock_test_needy:f")
    with pytest.raises(RewardError, match="importing penstock_test_failing failed: OSError: no disk"):
        load_function("penstock_test_failing:f")


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**1000), 2**1000) | st.booleans())
def test_finite_numbers_are_scores(number: float) -> None:
    assert normalise(number) == Score(float(number))


@given(
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_what_is_not_finite_is_never_a_score(bad: float, parts: dict[str, float]) -> None:
    assert isinstance(normalise(bad), Unscored)
    assert isinstance(normalise(Score(bad, parts)), Unscored)
    assert normalise(Score(1.0, {**parts, "bad": bad})) == Unscored(f"the score's part 'bad' is not finite: {bad}")


@given(
    st.none() | st.text() | st.binary() | st.lists(st.floats()) | st.dictionaries(st.text(), st.floats())
    | st.complex_numbers() | st.decimals()
)  # fmt: skip
def test_anything_else_is_unscored_and_named(value: object) -> None:
    result = normalise(value)
    assert isinstance(result, Unscored)
    assert type(value).__name__.removesuffix("Type") in result.cause


@pytest.mark.parametrize(
    ("score", "cause"),
    [
        (Score("1"), "value is str"),  # type: ignore[arg-type]
        (Score(None), "value is NoneType"),  # type: ignore[arg-type]
        (Score(1.0, {"a": "b"}), "part 'a' is str"),  # type: ignore[dict-item]
        (Score(1.0, {3: 1.0}), "name among the score's parts is int"),  # type: ignore[dict-item]
        (Score(1.0, [1.0]), "parts are list"),  # type: ignore[arg-type]
        (Score(10**400), "too large for a float"),
        (Score(decimal.Decimal(1)), "value is decimal.Decimal"),  # type: ignore[arg-type]
    ],
)
def test_a_score_with_wrong_contents_is_unscored(score: Score, cause: str) -> None:
    result = normalise(score)
    assert isinstance(result, Unscored)
    assert cause in result.cause


def test_numpy_and_other_real_numbers_are_scores() -> None:
    numpy = pytest.importorskip("numpy")
    for number in (numpy.float32(0.5), numpy.float64(0.5), fractions.Fraction(1, 2)):
        result = normalise(Score(number, {"raw": number}))
        assert result == Score(0.5, {"raw": 0.5})
        assert isinstance(result, Score)
        assert type(result.value) is float


def test_unscored_passes_through() -> None:
    assert normalise(Unscored("undecidable")) == Unscored("undecidable")


def test_causes_are_one_line_of_bounded_length() -> None:
    assert describe_exception(ValueError("one\n  two")) == "ValueError: one two"
    assert describe_exception(KeyError()) == "KeyError"
    assert len(describe_exception(ValueError("x" * 10_000))) == CAUSE_CHARACTERS
