"""Who adds and releases machines for a run: processes here, a user's scripts, Ray, Kubernetes, or a class of one's own.

Each is a `penstock.rollout.provision_types.Provisioner`, made with a `JoinOrder` and the options of `fleet.options`.
Which one, and how many machines, is the configuration's and the manager's.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.rollout.provision_types import JoinOrder, Provisioner

__all__ = ["BUILT_IN", "make_provisioner"]

BUILT_IN = {
    "local": "penstock.cli.provision.local:LocalProvisioner",
    "command": "penstock.cli.provision.command:CommandProvisioner",
    "ray": "penstock.cli.provision.on_ray:RayProvisioner",
    "kubernetes": "penstock.cli.provision.kube:KubernetesProvisioner",
}


def make_provisioner(name: str, join: JoinOrder, options: Mapping[str, Any]) -> Provisioner:
    """By its short name or import path (`package.module:Class`), made with `options`.

    Raises ConfigError where there is none, it won't take the options, or it lacks a method; MissingExtra where a
    package is missing.
    """
    path = BUILT_IN.get(name, name)
    module_name, _, attribute = path.partition(":")
    try:
        made: Provisioner = getattr(importlib.import_module(module_name), attribute)(join, **options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"fleet.provisioner={name!r} can't be made with the options {dict(options)}: {error}; it is one of "
            f"{', '.join(BUILT_IN)}, or package.module:Class"
        ) from error
    missing = [method for method in ("add", "release", "list", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"fleet.provisioner={name!r} has no {', '.join(missing)}")
    return made
