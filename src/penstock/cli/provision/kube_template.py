"""A user's Pod or Job, made into one machine: name, labels, and what its agent needs to join. Pure but for the reading.

Decides what is put in where the template leaves it out: the command, and variables that it does not set itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, MissingExtra
from penstock.rollout.provision_types import JoinOrder

__all__ = ["ContainerEnvironment", "filled_in", "read_template"]

KINDS = {"Pod": "v1", "Job": "batch/v1"}


class ContainerEnvironment:
    """What a container is told. `token_secret`: NAME/KEY; empty where the template sets PENSTOCK_TOKEN itself."""

    def __init__(self, join: JoinOrder, token_secret: str) -> None:
        self.join = join
        self.secret, slash, self.key = token_secret.partition("/")
        if token_secret and not (self.secret and slash and self.key):
            raise ConfigError(f"token_secret={token_secret!r}; write NAME/KEY of a Kubernetes secret")

    def variables(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"name": "PENSTOCK_RUN", "value": self.join.run},
            {"name": "PENSTOCK_MANAGER", "value": self.join.manager_url},
            {"name": "PENSTOCK_NAME", "value": name},
        ]
        if self.secret:
            chosen = {"name": self.secret, "key": self.key}
            rows.append({"name": "PENSTOCK_TOKEN", "valueFrom": {"secretKeyRef": chosen}})
        return rows


def read_template(path: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no Pod or Job."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"the template {path} can't be read: {error.strerror}; fleet.options.template") from error
    if path.suffix == ".json":
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
    else:
        try:
            import yaml
        except ImportError as error:
            raise MissingExtra("pyyaml", "kubernetes", "a template in YAML") from error
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is no YAML: {error}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in KINDS or found.get("apiVersion") != KINDS[kind]:
        raise ConfigError(f"{path} has kind {kind!r}; one Pod (v1) or one Job (batch/v1) is needed")
    return dict(found)


def filled_in(
    body: dict[str, Any], name: str, labels: Mapping[str, str], environment: ContainerEnvironment
) -> dict[str, Any]:
    """`body` as the machine `name`. Raises ConfigError where there is no container, or no token for it."""
    metadata = body.setdefault("metadata", {})
    metadata["name"] = name
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    spec = body.get("spec") or {}
    if body["kind"] == "Job":
        # A machine that ends is the manager's to replace.
        spec.setdefault("backoffLimit", 0)
        template = spec.get("template") or {}
        inner = template.setdefault("metadata", {})
        inner["labels"] = {**inner.get("labels", {}), **labels}
        spec = template.get("spec") or {}
    spec.setdefault("restartPolicy", "Never")
    containers = spec.get("containers") or []
    if not containers:
        raise ConfigError("the template has no container")
    first = containers[0]
    own = first.get("env", [])
    names = {row["name"] for row in own}
    if "PENSTOCK_TOKEN" not in names and not environment.secret:
        raise ConfigError("no container gets a token: set PENSTOCK_TOKEN in the template, or give token_secret")
    # Before the template's own, which may refer to them.
    first["env"] = [row for row in environment.variables(name) if row["name"] not in names] + own
    if "command" not in first and "args" not in first:
        first["command"] = ["penstock", *environment.join.words(name)]
    return body
