"""Who adds and releases machines for a run: processes here, a user's scripts, Ray, Kubernetes, or a class of one's own.

Each is a `penstock.rollout.provision_types.Provisioner`, made with a `JoinOrder` and the options of `fleet.options`.
Which one, and how many machines, is the configuration's and the manager's.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PenstockError
from penstock.rollout.provision_types import JoinOrder, Provisioner

__all__ = ["BUILT_IN", "check_provisioner", "make_provisioner"]

BUILT_IN = {
    "local": "penstock.cli.provision.local:LocalProvisioner",
    "command": "penstock.cli.provision.command:CommandProvisioner",
    "ray": "penstock.cli.provision.on_ray:RayProvisioner",
    "kubernetes": "penstock.cli.provision.kube:KubernetesProvisioner",
}


METHODS = ("add", "release", "list", "close")


def make_provisioner(name: str, join: JoinOrder, options: Mapping[str, Any]) -> Provisioner:
    """By its short name or import path (`package.module:Class`), made with `options`.

    Raises ConfigError where there is none, it won't take the options, or it lacks a method; MissingExtra where a
    package is missing.
    """
    kind = _class_of(name)
    try:
        made: Provisioner = kind(join, **options)
    except PenstockError:
        raise
    # A user's own may raise anything.
    except Exception as error:
        raise _unmade(name, options, error) from error
    missing = [method for method in METHODS if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"fleet.provisioner={name!r} has no {', '.join(missing)}")
    return made


def check_provisioner(name: str, options: Mapping[str, Any]) -> None:
    """What `make_provisioner` would refuse, before anything is started. A user's own is not made for it: that may
    reach for machines."""
    join = JoinOrder("check", "http://127.0.0.1:1", "check")
    if name in BUILT_IN:
        make_provisioner(name, join, options)
        return
    kind = _class_of(name)
    try:
        inspect.signature(kind).bind(join, **options)
    except (TypeError, ValueError) as error:
        raise _unmade(name, options, error) from error


def _class_of(name: str) -> Callable[..., Any]:
    """From the working directory too. Raises ConfigError."""
    module_name, _, attribute = BUILT_IN.get(name, name).partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # Last: what is installed comes first, as it would for an installed program.
        sys.path.append(here)
    try:
        if not attribute:
            raise ValueError("there is none of that name")
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except PenstockError:
        raise
    # A user's module may raise anything while it is imported.
    except Exception as error:
        raise _unmade(name, {}, error) from error
    return found


def _unmade(name: str, options: Mapping[str, Any], error: Exception) -> ConfigError:
    """Options by their names: a value may be secret."""
    given = f" with the options {', '.join(options)}" if options else ""
    return ConfigError(
        f"fleet.provisioner={name!r} can't be made{given}: {error}; it is one of {', '.join(BUILT_IN)}, or "
        "package.module:Class"
    )
