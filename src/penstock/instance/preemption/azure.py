"""Azure: scheduled events of type Preempt (thirty seconds ahead) and Terminate, for this machine.

A list may name events of other machines of the same group, so the machine's own name is asked for first.
https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import json
import re

from penstock.instance.preemption.metadata import Metadata
from penstock.instance.preemption.notice import MetadataError, Notice

__all__ = ["Azure"]

HEADERS = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents"
EVENTS_VERSION = {"api-version": "2020-07-01"}
NAME = "/metadata/instance/compute/name"
NAME_VERSION = {"api-version": "2021-02-01", "format": "text"}
ENDS = ("Preempt", "Terminate")
FIRST_ANSWER_S = 130.0
"""The first question switches the service on for the machine, which may take two minutes."""

_MACHINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class Azure:
    """`acknowledge`: once the agent has left, the event is approved, and the machine need not run to its deadline."""

    name = "Azure"

    def __init__(self, metadata: Metadata, acknowledge: bool = False) -> None:
        self._metadata = metadata
        self._acknowledge = acknowledge
        self._machine = ""
        self._event_id = ""

    async def present(self) -> bool:
        self._machine = await self._own_name()
        return True

    async def look(self) -> Notice | None:
        self._machine = self._machine or await self._own_name()
        answer = await self._metadata.ask(EVENTS, headers=HEADERS, params=EVENTS_VERSION, answer_s=FIRST_ANSWER_S)
        if answer.status != 200:
            raise MetadataError(f"{EVENTS} is answered with HTTP status {answer.status}")
        for event in _events(answer.text):
            if event.get("EventType") in ENDS and self._machine.lower() in _resources(event):
                self._event_id = str(event.get("EventId", ""))
                return Notice(self.name, f"scheduled event {event['EventType']}", str(event.get("NotBefore", ""))[:100])
        return None

    async def left(self, notice: Notice) -> None:
        if not (self._acknowledge and self._event_id):
            return
        answer = await self._metadata.ask(
            EVENTS,
            method="POST",
            headers=HEADERS,
            params=EVENTS_VERSION,
            json={"StartRequests": [{"EventId": self._event_id}]},
        )
        if answer.status != 200:
            raise MetadataError(f"the approval of event {self._event_id} is answered with HTTP status {answer.status}")

    async def _own_name(self) -> str:
        answer = await self._metadata.ask(NAME, headers=HEADERS, params=NAME_VERSION)
        if answer.status != 200 or not _MACHINE.fullmatch(answer.text):
            raise MetadataError(f"{NAME} is answered with {answer.text[:80]!r}, HTTP status {answer.status}")
        return answer.text


def _events(text: str) -> list[dict[str, object]]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise MetadataError(f"{EVENTS} is not JSON: {text[:80]!r}") from error
    events = document.get("Events") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MetadataError(f"{EVENTS} has no list of events: {text[:80]!r}")
    return events


def _resources(event: dict[str, object]) -> set[str]:
    """Names of the machines that an event is for, in lower case."""
    resources = event.get("Resources")
    return {str(name).lower() for name in resources} if isinstance(resources, list) else set()
