"""A user's own source of notices: an async function that returns what is going to happen, once it is known."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.errors import ConfigError
from penstock.instance.preemption.notice import MetadataError, Notice

__all__ = ["Own"]


class Own:
    """`path`: `package.module:function` of an `async def f() -> str`. It may wait as long as it likes."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._function = _load(path)

    async def present(self) -> bool:
        return True

    async def look(self) -> Notice | None:
        try:
            words = await self._function()
        # A user's function may raise anything; the watch says so and asks again.
        except Exception as error:
            raise MetadataError(f"{type(error).__name__}: {error}") from error
        if not isinstance(words, str):
            raise MetadataError(f"{self.name} returned {type(words).__name__}; a notice is text")
        return Notice(self.name, words[:200]) if words else None

    async def left(self, notice: Notice) -> None:
        """Nothing is told."""


def _load(path: str) -> Callable[[], Awaitable[object]]:
    """Raises ConfigError."""
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # Last: what is installed comes first, as it would for an installed program.
        sys.path.append(here)
    try:
        function = getattr(importlib.import_module(module_name), name)
    # A user's module may raise anything while it is imported; whatever it is, the function can't be used.
    except Exception as error:
        raise ConfigError(f"--preemption {path} can't be loaded: {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"--preemption {path} is no async function")
    return function
