"""Numbers of a command line within their bounds: argparse says which option holds a wrong one, these say why."""

from __future__ import annotations

import argparse

__all__ = ["at_least_0", "count", "port", "positive"]


def count(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is impossible; give at least 1")
    return number


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 65536:
        raise argparse.ArgumentTypeError(f"{number} is no port; give 0 to 65535")
    return number


def positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} is impossible; give a number above 0")
    return number


def at_least_0(text: str) -> float:
    number = float(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text} is impossible; give 0 or more")
    return number
