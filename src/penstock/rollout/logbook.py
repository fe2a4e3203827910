"""The manager's log, for a person: who joined and left, what failed or was refused, in sentences.

Decides what is worth a line. The event stream is the trainer's to keep; here each kind of repeat is logged at its
1st, 2nd, 4th, 8th time, so that neither a step nor a peer that keeps knocking fills the disk.
"""

from __future__ import annotations

import logging

from penstock.observe.events import Event
from penstock.observe.notices import Notices

__all__ = ["Logbook"]

log = logging.getLogger("penstock.manager")


class Logbook:
    """Writes to the logger `penstock.manager`."""

    def __init__(self) -> None:
        self._notices = Notices()

    def take(self, event: Event) -> None:
        notice = self._notices.take(event)
        if notice is not None and _is_power_of_two(notice.times):
            log.log(logging.WARNING if notice.mood == "trouble" else logging.INFO, "%s", notice)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
