"""Samples on their way: tracking, fleet, balance and packing (pure), the manager that joins them, and its edges.

The edges are imported by module path, since they bring an HTTP stack: `penstock.rollout.server.ManagerServer` and
`penstock.rollout.client.RolloutClient`.
"""

from penstock.rollout.balance import BalancePolicy, InstanceLoad, ShortestQueue
from penstock.rollout.fleet import Fleet, FleetConfig
from penstock.rollout.manager import TRAINER, Decisions, Manager, ManagerConfig
from penstock.rollout.pack import Packer
from penstock.rollout.tracker import Tracker

__all__ = [
    "TRAINER",
    "BalancePolicy",
    "Decisions",
    "Fleet",
    "FleetConfig",
    "InstanceLoad",
    "Manager",
    "ManagerConfig",
    "Packer",
    "ShortestQueue",
    "Tracker",
]
