"""Ranks of a run that are lost: who it was, how it ended, where its words are, and what to do.

Every rank watches the others of its machine; the first one that is left speaks. Decides what counts as lost (what ended
by itself, or with an interrupt, does not). Refuses to start ranks again, which is torchrun's. Linux tells of an exit by
a pidfd at once, and of its kind until torchrun, a tenth of a second later, has asked for it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.errors import RankLost
from penstock.train.ranks import Ranks

__all__ = ["Peer", "RankWatch"]

NOTICE_S = 1.0
"""For an exit to be seen once its connections have broken, which happens a moment before."""
_BROKEN = re.compile(r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe")
_OWN_WILL = (0, 128 + signal.SIGINT, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a rank that was done, or was ended like all others."""


class Peer(msgspec.Struct, frozen=True):
    """A rank, as it tells of itself."""

    rank: int
    host: str
    pid: int
    output: str
    """The file that its errors go to, or nothing."""

    @classmethod
    def own(cls, rank: int) -> Peer:
        errors = Path(f"/proc/{os.getpid()}/fd/2")
        output = str(errors.readlink()) if errors.is_file() else ""
        return cls(rank, socket.gethostname(), os.getpid(), output)


class _Ended(msgspec.Struct, frozen=True):
    peer: Peer
    code: int | None
    """As `subprocess` has it, negative for a signal; None where somebody else had taken it before."""
    at: float
    """time.monotonic()."""


class RankWatch:
    """Watches `peers` from a thread until it is closed."""

    def __init__(self, own: Peer, peers: Sequence[Peer]) -> None:
        here = [peer for peer in peers if peer.host == own.host]
        self._own = own
        self._ranks = len(peers)
        self._others = [peer for peer in here if peer.rank != own.rank]
        self._ended: list[_Ended] = []
        self._news = threading.Event()
        self._stop, self._stopped = os.pipe()
        self._thread: threading.Thread | None = None
        if self._others and hasattr(os, "pidfd_open"):
            self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, ranks: Ranks) -> RankWatch:
        """All ranks call it at the same time."""
        own = Peer.own(ranks.rank)
        told = ranks.collect(msgspec.json.encode(own))
        return cls(own, [msgspec.json.decode(data, type=Peer) for data in told])

    def close(self) -> None:
        os.close(self._stopped)
        if self._thread is not None:
            self._thread.join()
        os.close(self._stop)

    def explained(self, error: BaseException, resume: str, interrupted_at: float | None = None) -> BaseException | None:
        """What `error` comes of where that is a rank that was lost: a RankLost, or an exit for ranks that don't speak.

        `resume`: the command that goes on with the run. `interrupted_at`: when this rank was told to end, for an
        interrupt; what ended later ended of the same.
        """
        if self._ranks == 1 or not isinstance(error, RuntimeError | KeyboardInterrupt):
            return None
        if isinstance(error, RuntimeError) and not _BROKEN.search(str(error)):
            return None
        if isinstance(error, RuntimeError):
            self._news.wait(NOTICE_S)
        after = f"the run can't go on without it; from its last checkpoint it does with: {resume}"
        lost = [
            ended
            for ended in list(self._ended)
            if ended.code not in _OWN_WILL and (interrupted_at is None or ended.at <= interrupted_at)
        ]
        if not lost and isinstance(error, KeyboardInterrupt):
            return None
        if not lost:
            where = "on another machine is gone, or the network between them" if self._others else "is gone"
            return RankLost(f"another rank {where} ({_first_line(error)}); its own output says more; {after}")
        left = {self._own.rank, *(peer.rank for peer in self._others)} - {ended.peer.rank for ended in self._ended}
        if self._own.rank != min(left):
            return SystemExit(1)
        return RankLost(f"{'; '.join(map(_words, lost))}; {after}")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._stop, select.POLLIN | select.POLLHUP)
        watched: dict[int, Peer] = {}
        for peer in self._others:
            try:
                descriptor = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                self._note(peer)
                continue
            watched[descriptor] = peer
            poll.register(descriptor, select.POLLIN)
        try:
            while watched:
                for descriptor, _ in poll.poll():
                    if descriptor == self._stop:
                        return
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    self._note(watched.pop(descriptor))
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def _note(self, peer: Peer) -> None:
        self._ended.append(_Ended(peer, exit_code(peer.pid), time.monotonic()))
        self._news.set()


def exit_code(pid: int) -> int | None:
    """Of a process that has ended and whose parent has not asked yet, as `subprocess` has it; else None."""
    try:
        # Behind the name, which may have anything in it, come the fields from the third on; the last is the code.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None


def _words(ended: _Ended) -> str:
    peer, code = ended.peer, ended.code
    who = f"rank {peer.rank} (process {peer.pid} on {peer.host})"
    if code is None:
        how = "is gone; torchrun's own lines below say how it ended"
    elif code >= 0:
        how = f"ended with exit code {code}"
    else:
        how = f"was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as the kernel does where memory is short (dmesg tells)"
    return f"{who} {how}; what it said is {f'in {peer.output}' if peer.output else 'above'}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:200]
