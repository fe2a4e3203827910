"""How many machines a run may have and who adds them (docs/provisioning.md). Dollars, hours and seconds.

`FleetConfig` is the section `[fleet]` of a run; `FleetFile` is what `penstock manager --fleet` reads.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from penstock.config.section import Section

ACCOUNT_FILE = "fleet_account.json"
"""What machines cost, in the folder of who asks for them."""
NO_PRICES = ("local", "ray", "kubernetes")
"""Provisioners whose lists have no prices."""


class FleetConfig(Section):
    """Machines that the manager asks for and releases."""

    provisioner: str = Field(default="none", pattern=r"^([a-z]+|[\w.]+:\w+)$")
    """Who adds and releases machines: `none`, `local` (processes here), `command` (a script of yours), `ray`,
    `kubernetes`, or the import path (`package.module:Class`) of your own."""
    options: dict[str, Any] = {}
    """Options of the provisioner, by name."""
    floor: int = Field(default=0, ge=0)
    """There are never fewer for longer than one takes to start, unless the budget is spent. Instances that joined by
    hand are part of it, and of `first` and the ceiling, each as one, from when they connect."""
    ceiling: int = Field(default=8, ge=0)
    """No machine is asked for beyond it, those that start or leave included."""
    first: int = Field(default=1, ge=0)
    """Wanted before anything is known."""
    price_per_h: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Of one machine, where the provisioner tells none."""
    reserved_price_per_h: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Of the trainer's own machine: while it waits, this is what that costs."""
    hour_worth: float = Field(default=0, ge=0, allow_inf_nan=False)
    """What it is worth to be done an hour sooner, beside what the machines cost in it."""
    budget_per_h: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """For all machines together; by default there is no such bound."""
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """For the whole run, resumed parts included. Once it is spent, but for what releasing takes, there is none left."""
    start_s: float = Field(default=120, ge=0)
    """From asking for a machine to its readiness; measured from the first one on."""
    patience: int = Field(default=2, ge=1)
    """Steps in a row that must ask for another number."""
    cool_down_s: float = Field(default=120, ge=0)
    """A number must have been too large for so long, or as long as a machine takes to start, before any is released."""
    join_deadline_s: float = Field(default=900, gt=0)
    """A machine that has not joined by then is released."""
    rejoin_s: float = Field(default=90, gt=0)
    """One whose connection was lost is waited for so long."""
    drain_s: float = Field(default=60, ge=0)
    """A machine that is to go may finish its samples for so long; then they go on elsewhere."""
    call_s: float = Field(default=60, gt=0)
    """Deadline of one call of the provisioner."""
    list_s: float = Field(default=30, gt=0)
    """Between two lists of what there is; `local` is asked every second at least."""
    release_s: float = Field(default=60, gt=0)
    """For everything to be released when the run ends."""
    idle_s: float = Field(default=600, gt=0)
    """With no trainer for so long, all are released."""
    advertise: str = ""
    """Host name or address that machines reach the manager by; by default the first of `weights.advertise`, or this
    machine's name."""

    @field_validator("advertise")
    @classmethod
    def _host_alone(cls, host: str) -> str:
        if set(host) & set(",/[]@ ") or host.count(":") == 1:
            raise ValueError(
                f"fleet.advertise={host!r} is not one host: give a name or an address alone; the port is the manager's"
            )
        return host

    @model_validator(mode="after")
    def _in_order(self) -> FleetConfig:
        if self.floor > self.ceiling:
            raise ValueError(f"fleet.floor={self.floor} is over fleet.ceiling={self.ceiling}")
        if self.price_per_h and not (self.reserved_price_per_h or self.hour_worth) and self.floor < self.ceiling:
            raise ValueError(
                f"fleet.price_per_h={self.price_per_h:g} beside a trainer that costs nothing: no machine would be worth"
                " its price; give fleet.reserved_price_per_h or fleet.hour_worth, or fix the number (floor = ceiling)"
            )
        if (self.budget or self.budget_per_h) and not self.price_per_h and self.provisioner in NO_PRICES:
            raise ValueError(
                f"fleet.{'budget' if self.budget else 'budget_per_h'} needs fleet.price_per_h:"
                f" provisioner {self.provisioner!r} tells no prices"
            )
        return self

    @property
    def wanted(self) -> bool:
        """Whether anybody adds machines."""
        return self.provisioner != "none"


class FleetFile(Section):
    """What a manager of one's own is told (TOML), or a run's own by its trainer (JSON)."""

    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Marks the run's machines; no two runs at one provider may share it. A run's own manager is given its
    folder's name with a random id."""
    reserved_engines: int = Field(default=0, ge=0)
    """Engines on the trainer's own devices."""
    folder: str = ""
    """For the account (`fleet_account.json`) and the output of machines and scripts."""
    fleet: FleetConfig
