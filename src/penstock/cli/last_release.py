"""The last resort against machines that nobody ends: a run's own process lists them and releases them, with no manager.

One that fails keeps no other waiting, and is tried again until a list shows it no more, or as ended once its release
came back, or the time is over. What may still run then is known by name, with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from penstock.rollout.provision_edge import words_of
from penstock.rollout.provision_types import Provisioner

__all__ = ["LastRelease", "machines_of", "order_left_s", "ordered_at"]

log = logging.getLogger("penstock.provision")

RETRY_S = 0.5
"""Between two lists, at first; twice as long each time."""
RETRY_MOST_S = 8.0
CLOSE_S = 5.0
NOT_TRIED = "nobody could release it"
NOT_BACK = "its release has not come back"
NOT_SEEN = "it was released, and no list confirmed it"


def machines_of(account: Mapping[str, Any] | None) -> list[str]:
    """Those that a manager's account names; none where it is none."""
    found = account.get("machines") if account else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def ordered_at(account: Mapping[str, Any] | None) -> float:
    """Since when, in seconds since 1970, an order has been under way whose machines the account can't name; 0 where it
    tells of none."""
    since = account.get("asking") if account else None
    return since if isinstance(since, int | float) and since > 0 else 0.0


def order_left_s(account: Mapping[str, Any] | None, call_s: float, wall_s: float) -> float:
    """For how long an order that a manager's account tells of, and whose answer nobody takes any more, may still bring
    machines; 0 where it tells of none."""
    since = ordered_at(account)
    return max(0.0, since + call_s - wall_s) if since else 0.0


class LastRelease:
    """`make`: a provisioner, or raises. `known`: machines that the account names; they are released even where no list
    comes. `call_s`: deadline of one call. `order_s`: machines may still come for so long."""

    def __init__(self, make: Callable[[], Provisioner], known: list[str], call_s: float, order_s: float = 0.0) -> None:
        self._make = make
        self._call_s = call_s
        self.left = dict.fromkeys(known, NOT_TRIED)
        """Machines that may still run, and why."""
        self.gone: dict[str, None] = {}
        self.trouble = "there was no time for it"
        """Why there is no list; empty once one came, until the next fails."""
        self.order_open = order_s > 0
        """An order may still bring machines that no list has shown."""
        self._order_s = order_s
        self._known = frozenset(known)
        self._prices: dict[str, float | None] = {}
        """Of what was ever listed."""

    async def carry_out(self, limit_s: float) -> None:
        """Returns once a list shows that nothing is left and nothing more can come, or `limit_s` have passed. Raises
        what making the provisioner does."""
        provisioner = self._make()
        tasks: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.timeout(limit_s):
                await self._until_done(provisioner, tasks)
        except TimeoutError:
            # What is left says all.
            pass
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            try:
                async with asyncio.timeout(CLOSE_S):
                    await provisioner.close()
            except Exception as error:  # noqa: BLE001 - a user's provisioner may raise anything
                log.warning("the provisioner could not be closed: %s", words_of(error))

    async def _until_done(self, provisioner: Provisioner, tasks: dict[str, asyncio.Task[None]]) -> None:
        """`tasks`: the last release of each machine. They wait neither for each other nor for a list."""
        pause_s = RETRY_S
        loop = asyncio.get_running_loop()
        ordered_until = loop.time() + self._order_s

        def release(name: str) -> None:
            tasks[name] = asyncio.create_task(self._release(provisioner, name), name=f"release of {name}")

        for name in self.left:
            release(name)
        listing: asyncio.Task[dict[str, bool] | None] | None = None
        try:
            while True:
                if listing is None:
                    settled = {name: task for name, task in tasks.items() if task.done()}
                    confirmed = {name for name in settled if self.left.get(name) == NOT_SEEN}
                    closed = loop.time() >= ordered_until
                    listing = asyncio.create_task(self._list(provisioner), name="last list")
                await asyncio.wait({listing}, timeout=pause_s)
                rows, came = None, listing.done()
                if came:
                    rows, listing = listing.result(), None
                # Of those that are tried again meanwhile it says nothing.
                told_of = {name for name, task in settled.items() if tasks[name] is task}
                for name in told_of & self.left.keys() if rows is not None else ():
                    # One that is not there is gone even if its release failed: somebody else has ended it. Some
                    # providers show those that have ended for a while.
                    if not rows or name not in rows or (name in confirmed and not rows[name]):
                        del self.left[name]
                        self.gone[name] = None
                for name, alive in (rows or {}).items():
                    if name in self.gone and not alive:
                        continue
                    if name not in self.left:
                        self.gone.pop(name, None)
                        self.left[name] = NOT_TRIED
                        release(name)
                    elif name in told_of:
                        release(name)
                if not self.left and rows is not None and closed:
                    self.order_open = False
                    return
                for name, cause in self.left.items():
                    if tasks[name].done() and cause != NOT_SEEN:
                        release(name)
                if came:
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MOST_S)
        finally:
            if listing is not None:
                listing.cancel()
                await asyncio.gather(listing, return_exceptions=True)

    async def _list(self, provisioner: Provisioner) -> dict[str, bool] | None:
        """Those that are there, and whether each is alive; None where that can't be had."""
        try:
            async with asyncio.timeout(self._call_s):
                rows = {seen.id: seen for seen in await provisioner.list()}
        except TimeoutError as error:
            self.trouble = str(error) or f"no list came within {self._call_s:g} s"
        except Exception as error:  # noqa: BLE001 - a user's provisioner may raise anything
            self.trouble = words_of(error)
        else:
            self.trouble = ""
            self._prices |= {name: seen.price_per_h for name, seen in rows.items()}
            return {name: seen.alive for name, seen in rows.items()}
        return None

    async def _release(self, provisioner: Provisioner, name: str) -> None:
        if self.left[name] == NOT_TRIED:
            self.left[name] = NOT_BACK
        try:
            async with asyncio.timeout(self._call_s):
                await provisioner.release(name)
        except TimeoutError as error:
            self.left[name] = str(error) or f"its release did not come back within {self._call_s:g} s"
        except Exception as error:  # noqa: BLE001 - a user's provisioner may raise anything
            self.left[name] = words_of(error)
        else:
            self.left[name] = NOT_SEEN

    def booked(self, account: Mapping[str, Any], price_per_h: float, wall_s: float) -> dict[str, Any]:
        """The account as it is now: what is gone is no machine any more, and was paid for until `wall_s`.

        One that the last manager had not seen, and that was never listed here, was not there. `price_per_h`: where none
        is listed. Raises KeyError, TypeError or ValueError for what is no account.
        """
        spent, unbilled = float(account["spent"]), dict(account.get("unbilled", {}))
        for name in self._known:
            if name in unbilled and name not in self._prices:
                continue
            price = self._prices.get(name)
            hours = max(0.0, wall_s - float(unbilled.pop(name, account["at"]))) / 3600
            spent += (price_per_h if price is None else price) * hours
        unbilled = {name: since for name, since in unbilled.items() if name in self.left}
        booked = {**account, "spent": spent, "machines": list(self.left), "unbilled": unbilled, "at": wall_s}
        # Told until a list came that shows what it brought.
        return booked if self.order_open or self.trouble else {**booked, "asking": 0.0}
