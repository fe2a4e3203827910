"""Arithmetic in text, worked out without `eval`: what is allowed is listed, and the size of numbers has a bound."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

__all__ = ["ArithmeticRefused", "calculate"]

MAX_CHARACTERS = 200
MAX_DEPTH = 40
MAX_MAGNITUDE = 10**30
MAX_EXPONENT = 100

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class ArithmeticRefused(ValueError):
    """It is no arithmetic, or too large."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and parentheses, in at most twelve digits for fractions.

    Raises ArithmeticRefused with a short cause.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ArithmeticRefused(f"more than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArithmeticRefused("not an expression") from error
    value = _value(tree.body, 0)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr, depth: int) -> float:
    if depth > MAX_DEPTH:
        raise ArithmeticRefused("nested too deeply")
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return _bounded(value)  # type: ignore[arg-type]  # by the guard
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _combined(op, _value(left, depth + 1), _value(right, depth + 1))
    raise ArithmeticRefused("only numbers and + - * / // % ** ( )")


def _combined(op: ast.operator, left: float, right: float) -> float:
    if isinstance(op, ast.Pow) and abs(right) > MAX_EXPONENT:
        raise ArithmeticRefused(f"an exponent over {MAX_EXPONENT}")
    try:
        value = _BINARY[type(op)](left, right)
    except ZeroDivisionError:
        raise ArithmeticRefused("division by zero") from None
    except OverflowError:
        raise ArithmeticRefused("too large") from None
    if isinstance(value, complex):
        raise ArithmeticRefused("not a real number")
    return _bounded(value)


def _bounded(value: float) -> float:
    if not abs(value) <= MAX_MAGNITUDE:
        raise ArithmeticRefused("too large")
    return value
