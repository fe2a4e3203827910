"""GCP: `instance/preempted` turns TRUE thirty seconds ahead, and a host's maintenance that ends the machine is told.

The service holds a question with `wait_for_change` until the value differs from `last_etag`, so a notice comes at
once. https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
"""

from __future__ import annotations

from penstock.instance.preemption.metadata import ANSWER_S, Metadata
from penstock.instance.preemption.notice import MetadataError, Notice

__all__ = ["Gcp"]

INSTANCE = "/computeMetadata/v1/instance/"
FLAVOR = {"Metadata-Flavor": "Google"}
HOLD_S = 10
"""The service is asked to hold a question for so long; between two, the maintenance event is looked at."""


class Gcp:
    name = "GCP"

    def __init__(self, metadata: Metadata, hold_s: int = HOLD_S) -> None:
        self._metadata = metadata
        self._hold_s = hold_s
        self._etag = "0"

    async def present(self) -> bool:
        answer = await self._metadata.ask(f"{INSTANCE}preempted", headers=FLAVOR)
        return answer.headers.get("Metadata-Flavor") == "Google"

    async def look(self) -> Notice | None:
        maintenance = await self._metadata.ask(f"{INSTANCE}maintenance-event", headers=FLAVOR)
        if maintenance.status == 200 and maintenance.text == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(self.name, "the maintenance event TERMINATE_ON_HOST_MAINTENANCE")
        if maintenance.status == 200 and maintenance.text not in ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"):
            raise MetadataError(f"a maintenance event of {maintenance.text[:80]!r}")
        return await self._preempted()

    async def left(self, notice: Notice) -> None:
        """Nothing is told: the machine ends at its time."""

    async def _preempted(self) -> Notice | None:
        answer = await self._metadata.ask(
            f"{INSTANCE}preempted",
            headers=FLAVOR,
            params={"wait_for_change": "true", "timeout_sec": str(self._hold_s), "last_etag": self._etag},
            answer_s=self._hold_s + ANSWER_S,
        )
        if answer.status != 200 or answer.text not in ("TRUE", "FALSE"):
            raise MetadataError(f"preempted is answered with {answer.text[:80]!r}, HTTP status {answer.status}")
        self._etag = answer.headers.get("ETag", "0")
        return Notice(self.name, "the machine is preempted", "30 s from then") if answer.text == "TRUE" else None
