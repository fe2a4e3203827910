"""Tests of code as data: what a row declares, which program tries it, and what a run says.

Pure: decides how the usual shapes of tests are read, what is run for each and what verdict a run's outcome means. Knows
no sandbox. An expected output is never shown to the program that is tested; a test that is itself code (`assert ...`)
shares a process with the answer and can only be as honest as that.
"""

from __future__ import annotations

import enum
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.reward.verifiers.text import last_block

__all__ = ["Case", "Verdict", "cases_of", "code_of"]

RESULT_MARK = "penstock-result:"
CALL = """\
import json as _json, sys as _sys
_arguments, _calls = _json.loads(_sys.stdin.read())
exec(compile({code!r}, "answer.py", "exec"), _scope := {{"__name__": "answer"}})
_function = _scope.get(_calls) or getattr(_scope["Solution"](), _calls)
_value = _function(*_arguments)
_sys.stdout.write("\\n{mark}" + _json.dumps(_value, default=list) + "\\n")
"""
ASSERTS = """\
import sys as _sys
_word = _sys.stdin.read()
exec(compile({code!r}, "answer.py", "exec"), _scope := {{"__name__": "answer"}})
exec(compile({test!r}, "test.py", "exec"), _scope)
_sys.stdout.write("\\n{mark}" + _word + "\\n")
"""


class Verdict(enum.Enum):
    """What one test says of the code."""

    PASSED = "passed"
    WRONG = "wrong answer"
    TIME_OUT = "time-out"
    MEMORY = "memory"
    OUTPUT = "output limit"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Case:
    """One test: a program, its input, and what it must print or return."""

    program: str
    stdin: str
    expected: Any
    """Text that is printed; or, where `marked`, the value behind the last mark."""
    marked: bool = False

    def right(self, stdout: str) -> bool:
        """Whether a run that ended well gave the expected answer. White space at ends of lines doesn't count."""
        if not self.marked:
            return _lines(stdout) == _lines(self.expected)
        _, mark, value = stdout.rpartition(RESULT_MARK)
        try:
            return bool(mark) and _same(json.loads(value), self.expected)
        except (ValueError, RecursionError):
            return False


def code_of(response: str) -> str:
    """The response's code: its last fenced block, or all of it where there is none."""
    block = last_block(response)
    return response if block is None else block


def cases_of(tests: object, code: str) -> list[Case]:
    """A row's tests of some code.

    Taken are: a list of `{"input", "output"}`; `{"inputs": [...], "outputs": [...]}`, which with `fn_name` are the
    arguments and results of that function (or method of `Solution`); a list of statements such as `assert f(1) == 2`;
    a text of test code; and each of them as JSON text.

    Raises:
        ValueError: tests of no such shape, or none.
    """
    tests = _parsed(tests)
    if isinstance(tests, str) and tests.strip():
        return [_asserting(code, tests)]
    if isinstance(tests, Mapping):
        return _paired(tests, code)
    if isinstance(tests, Sequence) and tests and not isinstance(tests, str | bytes):
        if all(isinstance(test, str) for test in tests):
            return [_asserting(code, test) for test in tests]
        if all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
            return [_printing(code, test["input"], test["output"]) for test in tests]
    raise ValueError(
        'tests must be [{"input": ..., "output": ...}, ...], {"inputs": [...], "outputs": [...]}, with "fn_name" for '
        'calls, or ["assert ...", ...]'
    )


def _parsed(tests: object) -> object:
    """Some data sets keep their tests as JSON text."""
    if isinstance(tests, str) and tests.lstrip().startswith(("[", "{")):
        try:
            return json.loads(tests)
        except ValueError:
            return tests
    return tests


def _paired(tests: Mapping[Any, Any], code: str) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError("tests need 'inputs' and 'outputs' of the same number")
    if not inputs:
        raise ValueError("there are no tests")
    name = tests.get("fn_name")
    if not name:
        return [_printing(code, given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]
    return [_calling(code, str(name), given, wanted) for given, wanted in zip(inputs, outputs, strict=True)]


def _printing(code: str, given: object, wanted: object) -> Case:
    return Case(code, _text(given), _text(wanted))


def _calling(code: str, name: str, arguments: object, wanted: object) -> Case:
    if not isinstance(arguments, list | tuple):
        raise ValueError(f"the arguments of {name} are {arguments!r}; they must be a list")
    stdin = json.dumps([arguments, name])
    return Case(CALL.format(code=code, mark=RESULT_MARK), stdin, json.loads(json.dumps(wanted)), marked=True)


def _asserting(code: str, test: str) -> Case:
    word = secrets.token_hex(16)  # so that code that ends early, whatever it prints, has not passed
    return Case(ASSERTS.format(code=code, test=test, mark=RESULT_MARK), json.dumps(word), word, marked=True)


def _text(value: object) -> str:
    """Lists are lines, as some data sets have it."""
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    return value if isinstance(value, str) else json.dumps(value)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same(value: Any, expected: Any) -> bool:
    """Equal, numbers to nine digits. A data set's one-element list around the result counts as the result."""
    if isinstance(expected, list) and len(expected) == 1 and not isinstance(value, list):
        expected = expected[0]
    return _equal(value, expected)


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)
