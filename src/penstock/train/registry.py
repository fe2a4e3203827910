"""Functions that a configuration names: registered ones by their own name, a user's by import path.

Decides what a name stands for and how a wrong one is refused. Refuses to know what the functions do.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from penstock.errors import ConfigError, PenstockError

__all__ = ["Registry", "import_function"]

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """The functions that the configuration key `key` may name; `what` says in a word what they are."""

    def __init__(self, key: str, what: str) -> None:
        self._key = key
        self._what = what
        self._functions: dict[str, F] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """Registers a function under `name`. Raises ValueError where the name is taken by another one."""

        def keep(function: F) -> F:
            if self._functions.get(name, function) is not function:
                raise ValueError(f"{self._what} named '{name}' is registered already")
            self._functions[name] = function
            return function

        return keep

    @property
    def names(self) -> list[str]:
        return sorted(self._functions)

    def get(self, name: str) -> F:
        """What is registered under `name`, or what it imports as `package.module:function`. Raises ConfigError."""
        if name in self._functions:
            return self._functions[name]
        if ":" in name:
            return cast(F, import_function(self._key, name))
        raise ConfigError(
            f"{self._key}={name!r} is unknown; registered are: {', '.join(self.names)}; "
            "a function of your own is named by its import path, 'package.module:function'"
        )


def import_function(key: str, path: str) -> Callable[..., Any]:
    """Imports `package.module:function`, from the working directory too. Raises ConfigError naming what is wrong."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key}={path!r} is not of the form 'package.module:function'")
    here = str(Path.cwd())
    if here not in sys.path:
        # Last: what is installed comes first, as it would for an installed program.
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except PenstockError:
        raise
    # A user's module may raise anything while it is imported; whatever it is, the name can't be used.
    except Exception as error:
        raise ConfigError(f"{key}={path!r}: can't import {module_name}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}={path!r}: {module_name} has no function '{name}'")
    return cast(Callable[..., Any], function)
