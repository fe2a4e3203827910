"""From `[fleet]` to a manager that adds and releases machines. Decides nothing."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from penstock.cli.announced import reachable
from penstock.cli.provision import make_provisioner
from penstock.config.fleet import ACCOUNT_FILE, FleetConfig, FleetFile
from penstock.errors import ConfigError
from penstock.rollout.provision_types import JoinOrder, ProvisionConfig, Provisioner
from penstock.rollout.server import ManagerServer

__all__ = ["provide", "provision_config", "provisioner_of", "read_fleet_file"]

LOCAL_LIST_S = 1.0
"""Processes here are listed so often: it costs nothing, and one that ends is told at once."""


def read_fleet_file(path: Path) -> FleetFile:
    """TOML, or JSON by its name. Raises ConfigError, with the key."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--fleet: {path} can't be read: {error.strerror}") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return FleetFile.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--fleet: {path}: {where}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"--fleet: {path} is neither TOML nor JSON: {error}") from error


def provision_config(fleet: FleetConfig, reserved_engines: int) -> ProvisionConfig:
    return ProvisionConfig(
        # With no engine of its own, a run without machines would wait for ever.
        floor=max(fleet.floor, 0 if reserved_engines else min(1, fleet.ceiling)),
        ceiling=fleet.ceiling,
        first=fleet.first,
        price_per_h=fleet.price_per_h,
        reserved_price_per_h=fleet.reserved_price_per_h,
        hour_worth=fleet.hour_worth,
        budget_per_h=math.inf if fleet.budget_per_h is None else fleet.budget_per_h,
        budget=math.inf if fleet.budget is None else fleet.budget,
        start_s=fleet.start_s,
        patience=fleet.patience,
        cool_down_s=fleet.cool_down_s,
        join_deadline_s=fleet.join_deadline_s,
        rejoin_s=fleet.rejoin_s,
        drain_s=fleet.drain_s,
        call_s=fleet.call_s,
        list_s=min(fleet.list_s, LOCAL_LIST_S) if fleet.provisioner == "local" else fleet.list_s,
        idle_s=fleet.idle_s,
    )


def provisioner_of(settings: FleetFile, url: str, token: str, tls_words: Sequence[str]) -> Provisioner:
    """`url`: as the manager says that it listens. Raises ConfigError, MissingExtra."""
    join = JoinOrder(
        run=settings.run,
        manager_url=reachable(url, settings.fleet.advertise, here=settings.fleet.provisioner == "local"),
        token=token,
        arguments=tuple(tls_words),
        folder=str(Path(settings.folder) / "logs") if settings.folder else "",
    )
    return make_provisioner(settings.fleet.provisioner, join, settings.fleet.options)


def provide(server: ManagerServer, settings: FleetFile, url: str, token: str, tls_words: Sequence[str]) -> None:
    """Has a server that listens at `url` add and release machines. Raises ConfigError, MissingExtra."""
    fleet = settings.fleet
    if not fleet.wanted:
        return
    server.provide(
        provision_config(fleet, settings.reserved_engines),
        provisioner_of(settings, url, token, tls_words),
        reserved_engines=settings.reserved_engines,
        account=Path(settings.folder) / ACCOUNT_FILE if settings.folder else None,
        release_s=fleet.release_s,
    )
