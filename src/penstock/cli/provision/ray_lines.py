"""What the provisioner for Ray and its child say to each other: lines of JSON over the child's standard streams.

The first line in is `Begin`; every other one is a `Call`, which is answered by one `Answer`, in any order.
"""

from __future__ import annotations

import msgspec

__all__ = ["AddActors", "Answer", "Begin", "Call", "ListActors", "ReleaseActor", "Row"]


class Begin(msgspec.Struct, tag="begin"):
    """`placement`: options of Ray for each actor. `stem`: of the names of the run's actors."""

    address: str
    namespace: str
    stem: str
    placement: dict[str, float | dict[str, float]]
    environment: dict[str, str]
    """Of the agents. It has their token, and so goes by a pipe."""
    leave_s: float


class AddActors(msgspec.Struct, tag="add"):
    machines: dict[str, list[str]]
    """By name: the words for `penstock`."""


class ReleaseActor(msgspec.Struct, tag="release"):
    machine: str


class ListActors(msgspec.Struct, tag="list"):
    pass


class Call(msgspec.Struct):
    number: int
    request: AddActors | ReleaseActor | ListActors


class Row(msgspec.Struct):
    name: str
    cause: str = ""
    """Why it has ended; empty while it has not."""


class Answer(msgspec.Struct):
    number: int
    error: str = ""
    rows: list[Row] = []
