"""From an import path to an environment: decides what may be named and how a wrong name is refused.

What is named is called once with `tokenizer` and the options, by keyword, and returns the environment: a class, or a
function.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from penstock.environments.protocol import Environment
from penstock.errors import ConfigError, PenstockError

__all__ = ["load_environment"]


def load_environment(path: str, options: Mapping[str, Any], tokenizer: Any) -> Environment:
    """Makes the environment at `package.module:Name` or `./file.py:Name`. Raises ConfigError that says what is wrong,
    or whatever PenstockError it raises itself."""
    origin, colon, name = path.rpartition(":")
    if not colon or not origin or not name:
        raise ConfigError(f"environment.path={path!r} is not of the form 'package.module:Class' or './file.py:Class'")
    try:
        module = _import_file(path, Path(origin)) if origin.endswith(".py") else _import_module(origin)
    except PenstockError:
        raise
    # A user's module may raise anything while it is imported; whatever it is, the name can't be used.
    except Exception as error:
        raise ConfigError(f"environment.path={path!r}: can't import {origin}: {_words(error)}") from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ConfigError(f"environment.path={path!r}: {origin} has no class or function '{name}'")
    _check_options(path, make, options)
    try:
        made = make(tokenizer=tokenizer, **options)
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(f"environment.path={path!r} can't be made: {_words(error)}") from error
    missing = [method for method in ("reset", "step", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"environment.path={path!r}: a {type(made).__name__} has no {' and no '.join(missing)}")
    return cast(Environment, made)


def _check_options(path: str, make: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
        signature.bind(tokenizer=None, **options)
    except ValueError:
        return
    except TypeError as error:
        raise ConfigError(
            f"environment.path={path!r}: {error}; it is called with tokenizer and environment.options, and takes "
            f"{signature}"
        ) from error


def _import_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        # Last: what is installed comes first, as it would for an installed program.
        sys.path.append(here)
    return importlib.import_module(name)


def _import_file(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"environment.path={path!r}: there is no file {file.resolve()}")
    name = f"penstock_environment_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"environment.path={path!r}: {file} is not a Python file")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
