"""The end of a run's machines: whatever ends the run, everything that was asked for is released first.

The manager does it, since it knows them. Where it can't be reached any more, the trainer's own process lists the run's
machines and releases them itself; what may still run after that is told by name.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from penstock.cli.announced import announced
from penstock.cli.last_release import LastRelease, machines_of, order_left_s, ordered_at
from penstock.cli.run_folder import fleet_mark
from penstock.config.fleet import ACCOUNT_FILE, FleetFile
from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.observe import events
from penstock.observe.instances import RUN_ENDED
from penstock.rollout.provision_edge import Account, words_of
from penstock.rollout.provision_types import Provisioner
from penstock.train.edge import EdgeLoop
from penstock.train.processes import READY_FILE

__all__ = ["RunFleet", "fleet_file"]

POLL_S = 0.1
CALL_S = 5.0


def fleet_file(config: RunConfig, folder: Path) -> FleetFile:
    """What the run's manager is told. Raises StorageError."""
    fleet = config.fleet.model_copy(update={"advertise": announced(config)})
    return FleetFile(
        run=fleet_mark(folder) if fleet.wanted else folder.name,
        reserved_engines=config.rollout.engines.count,
        folder=str(folder.resolve()),
        fleet=fleet,
    )


class RunFleet:
    """`file`: what the run's manager is told. `token`: an operator's; `agent_token`: for a provisioner that has to be
    made here. It is there before the manager is, which asks for machines as soon as it listens."""

    def __init__(
        self,
        config: RunConfig,
        file: FleetFile,
        token: str,
        agent_token: str,
        edge: EdgeLoop,
        emit: Callable[[events.Event], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config.fleet
        self._file = file
        self._ready = Path(file.folder) / READY_FILE
        self.manager_url = ""
        """Empty for one that may listen, and has not said so to its run."""
        self._token = token
        self._agent_token = agent_token
        self._edge = edge
        self._emit = emit
        self._tls = tls
        self._released = not config.fleet.wanted

    def release(self) -> None:
        """Returns once everything is released, or the manager and then this process have each tried for
        `fleet.release_s` and a while, this process for twice that while an order may bring machines; never raises."""
        if self._released:
            return
        self._released = True
        limit_s = self._config.release_s
        account = Account(Path(self._file.folder) / ACCOUNT_FILE)
        before = account.read()
        listened = bool(self.manager_url) or self._ready.exists()
        if not (machines_of(before) or ordered_at(before) or account.trouble or listened):
            return  # No manager has asked for anything.
        try:
            self._edge.run(self._by_manager(limit_s), "releasing the run's machines", limit_s + 2 * CALL_S)
            return
        except (PenstockError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"the manager did not release the run's machines: {words_of(error)}")
        saved = account.read()
        if account.trouble:
            self._warn(account.trouble)
        order_s = order_left_s(saved, self._config.call_s, time.time())
        last = LastRelease(self._provisioner, machines_of(saved), self._config.call_s, order_s)
        # An order that is open can be seen to have ended only after its time, and what it brings is to be ended then.
        limit_s += min(order_s, limit_s)
        try:
            self._edge.run(last.carry_out(limit_s), "releasing the run's machines", limit_s + 2 * CALL_S)
        except Exception as error:  # noqa: BLE001 - a user's provisioner may raise anything, and the run ends anyway
            last.trouble = words_of(error)
        self._tell(last)
        self._book(account, saved, last)

    async def _by_manager(self, limit_s: float) -> None:
        url = self.manager_url or str(json.loads(self._ready.read_text())["url"])
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
            asking = session.post(f"{url}/fleet/release", params={"cause": RUN_ENDED}, ssl=self._tls or True)
            async with asking as response:
                response.raise_for_status()
                state: dict[str, Any] = await response.json()
            deadline = time.monotonic() + limit_s
            while not state["done"]:
                if time.monotonic() > deadline:
                    left = ", ".join(row["machine"] for row in state["machines"]) or "not known"
                    raise PenstockError(f"not everything was released within {limit_s:g} s; left: {left}")
                await asyncio.sleep(POLL_S)
                async with session.get(f"{url}/fleet", ssl=self._tls or True) as response:
                    response.raise_for_status()
                    state = await response.json()

    def _provisioner(self) -> Provisioner:
        from penstock.cli.provision.wiring import provisioner_of

        # Nobody is to join by it: it makes no machine.
        return provisioner_of(self._file, "http://none", self._agent_token, ())

    def _tell(self, last: LastRelease) -> None:
        if last.gone:
            self._warn(f"released without the manager: {', '.join(last.gone)}")
        told = [f"{name} ({cause})" for name, cause in last.left.items()]
        if last.trouble:
            told.append(f"they can't be listed: {last.trouble}")
        if last.order_open:
            told.append("some were being asked for when the manager ended, and no list has shown them")
        if told:
            words = "; ".join(told)
            self._warn(f"machines of the run {self._file.run} may still run and cost money: {words}")

    def _book(self, account: Account, saved: dict[str, Any] | None, last: LastRelease) -> None:
        """So that the next manager takes nothing for alive that is gone."""
        if saved is None:
            return
        try:
            account.write(last.booked(saved, self._config.price_per_h, time.time()))
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"{ACCOUNT_FILE} is no account, and stays as it is: {error!r}")
        if account.trouble:
            self._warn(account.trouble)

    def _warn(self, message: str) -> None:
        self._emit(events.Warned(ts=time.time(), where="provisioner", message=message))
