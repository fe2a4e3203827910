"""Which instances run on which machine, by the words that `penstock join` is given.

Decides only that: a machine's instances have its id as their name, or are on a host of that name, with or without its
domain. There may be several, as with one agent for each GPU, or while a connection that was cut is not missed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence

from penstock.rollout.lately import Lately
from penstock.rollout.provision_types import InstanceView, Machine

__all__ = ["ByHand", "matched", "names"]


def names(view: InstanceView) -> tuple[str, ...]:
    """Under which its machine may be known."""
    return view.name, view.host, view.host.partition(".")[0]


def matched(
    machines: Iterable[Machine], instances: Iterable[InstanceView]
) -> tuple[dict[int, list[InstanceView]], list[InstanceView]]:
    """Instances by their machine's number, and those on no machine. The trainer's own are neither."""
    by_id = {machine.id: machine for machine in machines if machine.id}
    found: dict[int, list[InstanceView]] = {}
    others = []
    for view in instances:
        if view.reserved:
            continue
        machine = next((by_id[name] for name in names(view) if name in by_id), None)
        if machine is None:
            others.append(view)
        else:
            found.setdefault(machine.number, []).append(view)
    return found, others


class ByHand:
    """Connected instances that nobody here has asked for, whether they work yet, load weights or wait for a trainer:
    they are part of what is wanted, and cost nothing here.

    One that is gone is missed after `rejoin_s`, as a machine of ours would be, or once another comes: each connection
    has a peer of its own, so it may be the same.
    """

    def __init__(self, rejoin_s: float) -> None:
        self.number = 0
        self._rejoin_s = rejoin_s
        self._seen: dict[str, float] = {}
        """When each peer was there last."""
        self._came: dict[str, tuple[float, str, str]] = {}
        """When each peer was there first, what it is called, and its host."""
        self._before = Lately()

    def restore(self, number: int, now: float) -> None:
        """An earlier manager had so many, and they will be back."""
        self._before.note(number, now)

    def see(
        self, others: Sequence[InstanceView], ours: Container[str], ended: Callable[[str], bool], now: float
    ) -> None:
        """`others`: on no machine; `ours`: peers on one, which nobody may have known of when they came; `ended`: that
        the machine of this name has just ended, and its connections are not missed yet."""
        here = {view.peer for view in others if not any(map(ended, names(view)))}
        known = {
            peer: at
            for peer, at in self._seen.items()
            if peer not in ours and (peer in here or not self._over(at, now))
        }
        gone = sorted(known.keys() - here, key=known.__getitem__)
        for peer in gone[: len(here - known.keys())]:
            del known[peer]
        self._seen = known | dict.fromkeys(here, now)
        came = {
            view.peer: (now, view.name if view.name == view.host else f"{view.name} on {view.host}", view.host)
            for view in others
        }
        self._came = {
            peer: self._came.get(peer) or came[peer] for peer in self._seen if peer in self._came or peer in came
        }
        self.number = max(len(self._seen), int(self._before.most(now - self._rejoin_s) or 0))

    def sure(self, asked_at: Iterable[float]) -> int:
        """Without as many as may be on machines that were asked for then, and may have joined under other names: those
        on one host may be one machine's."""
        left, doubted = deque(sorted(asked_at)), 0
        hosts: set[str] = set()
        for came, _, host in sorted(self._came.values()):
            if left and left[0] <= came and host not in hosts:
                left.popleft()
                hosts.add(host)
            doubted += host in hosts
        return self.number - min(doubted, len(self._seen))

    def since(self, asked_at: float) -> list[str]:
        """What those are called that came after then."""
        return [name for came, name, _ in sorted(self._came.values()) if came >= asked_at]

    def _over(self, at: float, now: float) -> bool:
        return now - at > self._rejoin_s
