"""Reward functions: from an import path to something callable, and from what it returns to a score.

Decides what a valid reward function is and what a valid result is. Knows neither deadlines nor processes. A result
that is missing, not finite or of the wrong type is Unscored with its cause; it never becomes a number.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import PenstockError, RewardError
from penstock.reward.options import with_options
from penstock.sample import Score, Unscored

__all__ = ["RewardFunction", "describe_exception", "function_of", "load_function", "normalise"]

CAUSE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function. A synchronous one may still return an awaitable; whoever calls it looks."""

    path: str
    call: Callable[[Any], Any]
    is_async: bool


def load_function(path: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Loads `package.module:function` or `./file.py:function`, with its options; the name may be dotted.

    Raises RewardError that says what is wrong: no such module or file, an error while importing it, no such name,
    not callable, an option that it doesn't take, or not callable with one sample.
    """
    origin, colon, name = path.rpartition(":")
    if not colon or not origin or not name:
        raise RewardError(
            f"reward.function is '{path}'; it must be 'package.module:function' or './my_reward.py:function'"
        )
    module = _import_file(path, origin) if origin.endswith(".py") else _import_module(path, origin)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise RewardError(f"reward.function '{path}': {origin} has no '{name}'{_functions_hint(module)}")
        found = getattr(found, part)
    _check_kind(path, found)
    found = with_options(path, found, options or {})
    _check_signature(path, found)
    return RewardFunction(path, found, _is_async(found))


def function_of(call: Callable[[Any], Any]) -> RewardFunction:
    """A callable that is there already, as a reward function.

    Raises RewardError where it is a class or can't be called with one sample.
    """
    path = getattr(call, "__qualname__", type(call).__name__)
    _check_kind(path, call)
    _check_signature(path, call)
    return RewardFunction(path, call, _is_async(call))


def normalise(result: object) -> Score | Unscored:
    """What a reward function returned, as a score: real numbers and Score are scores, everything else is Unscored."""
    match result:
        case Score():
            return _checked_score(result)
        case Unscored():
            return result
        case None:
            return Unscored("the reward function returned None")
        case numbers.Real():
            return _checked_score(Score(result))  # type: ignore[arg-type]  # made a float by _checked_score
    return Unscored(f"the reward function returned {_type_name(result)}; it must return a number or a Score")


def describe_exception(error: BaseException) -> str:
    """Type and message of what a reward function raised, on one line of bounded length."""
    text = " ".join(str(error).split())
    whole = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return whole if len(whole) <= CAUSE_CHARACTERS else whole[: CAUSE_CHARACTERS - 1] + "…"


def _checked_score(score: Score) -> Score | Unscored:
    value = _finite(score.value, "value")
    if isinstance(value, Unscored):
        return value
    parts: dict[str, float] = {}
    try:
        items = list(score.parts.items())
    except AttributeError:
        return Unscored(f"the score's parts are {_type_name(score.parts)}; they must map names to numbers")
    for name, part in items:
        if not isinstance(name, str):
            return Unscored(f"a name among the score's parts is {_type_name(name)}; it must be text")
        number = _finite(part, f"part '{name}'")
        if isinstance(number, Unscored):
            return number
        parts[name] = number
    return Score(value, parts)


def _finite(number: object, what: str) -> float | Unscored:
    if not isinstance(number, numbers.Real):
        return Unscored(f"the score's {what} is {_type_name(number)}; it must be a number")
    try:
        value = float(number)
    except OverflowError:
        return Unscored(f"the score's {what} is too large for a float")
    return value if math.isfinite(value) else Unscored(f"the score's {what} is not finite: {value}")


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _import_module(path: str, name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            raise RewardError(f"reward.function '{path}': there is no module '{missing}'") from error
        raise RewardError(f"reward.function '{path}': {name} imports '{missing}', which is not installed") from error
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward.function '{path}': '{name}' is not a module's name: {error}") from error
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward.function '{path}': importing {name} failed: {describe_exception(error)}") from error


def _import_file(path: str, file_name: str) -> ModuleType:
    """Loads a file under a name of its own; modules beside it can be imported by it."""
    file = Path(file_name).resolve()
    if not file.is_file():
        raise RewardError(f"reward.function '{path}': there is no file {file}")
    name = f"penstock_reward_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"reward.function '{path}': {file} is not a Python file")
    _make_importable(file.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"reward.function '{path}': running {file} failed: {describe_exception(error)}") from error
    return module


def _make_importable(folder: Path) -> None:
    """Last on the path: what is installed comes first, as it would for an installed program."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _check_kind(path: str, found: object) -> None:
    if inspect.isclass(found):
        raise RewardError(f"reward.function '{path}' is a class; name a function, or an instance that can be called")
    if not callable(found):
        raise RewardError(f"reward.function '{path}' is {_type_name(found)}, which can't be called")


def _check_signature(path: str, found: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(found)
    except (ValueError, TypeError):
        return  # a built-in without a signature; calling it will tell
    try:
        signature.bind(None)
    except TypeError as error:
        raise RewardError(
            f"reward.function '{path}' has the parameters {signature}; it is called with one sample: f(sample)"
        ) from error


def _is_async(found: Any) -> bool:
    """Also true of an object whose `__call__` is async."""
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__)


def _functions_hint(module: ModuleType) -> str:
    names = list(getattr(module, "__all__", ())) if hasattr(module, "__getattr__") else []
    names = names or [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    return f"; its functions are {', '.join(names[:8])}" if names else ""
