"""The faster ways than a connection, by name, as configuration and command line give them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from penstock.weights.addresses import outward_address
from penstock.weights.protocol import Way
from penstock.weights.shm import SharedFetcher, SharedLender
from penstock.weights.transport import Fetcher, Lender, WayClosed

__all__ = ["WAYS", "fetchers_of", "lenders_of"]

WAYS = ("shm", "mooncake")

log = logging.getLogger(__name__)


def fetchers_of(names: Sequence[str]) -> list[Fetcher]:
    """A puller's ways, in the order given; one that this machine does not have is said, here and with each version.

    Raises MissingExtra for one whose package is not installed.
    """
    fetchers: list[Fetcher] = []
    for name in names:
        try:
            fetchers.append(_fetcher(name))
        except WayClosed as error:
            log.warning("weights do not come by %s: %s", name, error)
            fetchers.append(_ClosedFetcher(name, str(error)))
    return fetchers


def lenders_of(names: Sequence[str], host: str) -> list[Lender]:
    """A store's ways; one that this machine does not have is said and left out.

    `host` is the address at which others reach this machine. Raises MissingExtra as `fetchers_of`.
    """
    lenders = []
    for name in names:
        try:
            lenders.append(_lender(name, host))
        except WayClosed as error:
            log.warning("weights are not lent by %s: %s", name, error)
    return lenders


class _ClosedFetcher:
    """A way that this machine does not have."""

    def __init__(self, kind: str, cause: str) -> None:
        self.kind = kind
        self._cause = cause

    def says(self) -> NoReturn:
        raise WayClosed(self._cause)

    def open(self, way: Way) -> NoReturn:
        raise WayClosed(self._cause)


def _fetcher(name: str) -> Fetcher:
    if name == "shm":
        return SharedFetcher()
    from penstock.weights.mooncake import MooncakeFetcher

    return MooncakeFetcher(outward_address())


def _lender(name: str, host: str) -> Lender:
    if name == "shm":
        return SharedLender()
    from penstock.weights.mooncake import MooncakeLender

    return MooncakeLender(host)
