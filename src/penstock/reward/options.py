"""Options of a reward function: `reward.options` in TOML, keyword arguments in Python.

Decides which options a function takes (its keyword parameters) and whether values fit their annotations; refuses
others by name, before the first sample. Knows nothing of what a function does with them. A function marked with
`factory` gets its options once and returns the reward function; any other gets them with every sample.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from penstock.errors import RewardError

__all__ = ["factory", "is_factory", "with_options"]

P = ParamSpec("P")
R = TypeVar("R", bound=Callable[..., Any])


def factory(make: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that takes options and returns a reward function, which is then called by the same name."""

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> R:
        function = make(*args, **options)
        function.__name__ = make.__name__
        return function

    made.penstock_factory = True  # type: ignore[attr-defined]
    return made


def is_factory(found: object) -> bool:
    return getattr(found, "penstock_factory", False) is True


def with_options(path: str, found: Callable[..., Any], options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """`found` as a function of one sample, with its options in place.

    Raises:
        RewardError: an option that isn't there, is missing or has an impossible value; names it and `path`.
    """
    if not is_factory(found):
        if not options:
            return found
        return functools.partial(found, **_checked(path, found, options, _parameters(found, skip=1)))
    known = _parameters(found, skip=0)
    values = _checked(path, found, options, known)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in values:
            raise RewardError(f"reward.function '{path}' needs the option '{name}' in reward.options")
    try:
        return found(**values)
    except RewardError as error:
        raise RewardError(f"reward.function '{path}': {error}") from error


def _parameters(found: Callable[..., Any], skip: int) -> dict[str, inspect.Parameter]:
    """What may be given by keyword, the sample left out."""
    try:
        parameters = list(inspect.signature(found).parameters.values())[skip:]
    except (ValueError, TypeError):
        return {}
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name: parameter for parameter in parameters if parameter.kind in by_keyword}


def _checked(
    path: str, found: Callable[..., Any], options: Mapping[str, Any], known: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"its options are: {', '.join(known) or 'none'}"
            raise RewardError(f"reward.function '{path}' has no option '{name}'; {hint}")
    if not options:
        return {}
    try:
        hints = typing.get_type_hints(inspect.unwrap(found), include_extras=True)
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return dict(options)
    return {name: _fitted(path, name, value, hints.get(name, Any)) for name, value in options.items()}


def _fitted(path: str, name: str, value: Any, kind: Any) -> Any:
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # a model or dataclass, which brings its own configuration
        adapter = TypeAdapter(kind)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join([name, *map(str, fault["loc"])])
        raise RewardError(f"reward.function '{path}': option '{where}' is {fault['input']!r}: {fault['msg']}") from None
