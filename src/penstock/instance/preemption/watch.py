"""Watches for the notice that this machine will be taken away.

Decides which source is asked (found out by itself, or named), how often, and what trouble is told. A metadata service
that hangs, refuses or talks nonsense is asked again and again, and never disturbs the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from penstock.errors import ConfigError
from penstock.instance.preemption.aws import Aws
from penstock.instance.preemption.azure import Azure
from penstock.instance.preemption.gcp import Gcp
from penstock.instance.preemption.metadata import LINK_LOCAL, Metadata
from penstock.instance.preemption.notice import MetadataError, Notice, NoticeSource
from penstock.instance.preemption.own import Own

__all__ = ["CHOICES", "Preemption", "PreemptionConfig"]

CHOICES = ("auto", "aws", "gcp", "azure", "none")
PROBE_S = 2.0
"""For a metadata service to answer at all, where it is not known whether there is one."""
LEFT_S = 2.0
"""To tell the service, after the agent has left, that it has."""
LONGEST_PAUSE_S = 30.0

TROUBLES = (aiohttp.ClientError, OSError, TimeoutError, MetadataError)

log = logging.getLogger("penstock.preemption")


@dataclass(frozen=True, slots=True)
class PreemptionConfig:
    source: str = "auto"
    """One of CHOICES, or `package.module:function` of an async function that returns once there is a notice."""
    base_url: str = LINK_LOCAL
    poll_s: float = 2.0
    """Between two questions."""
    rebalance: bool = False
    """AWS: a recommendation to rebalance counts as a notice."""
    acknowledge: bool = False
    """Azure: approve the event once the agent has left."""


class Preemption:
    """One machine's watch. Raises ConfigError for a source that is not known or can't be loaded."""

    def __init__(self, config: PreemptionConfig) -> None:
        if config.source not in CHOICES and ":" not in config.source:
            raise ConfigError(
                f"--preemption {config.source} is not known; one of {', '.join(CHOICES)}, or package.module:function"
            )
        self._config = config
        self._own = Own(config.source) if ":" in config.source else None
        self._source: NoticeSource | None = None
        self._notice: Notice | None = None

    async def watch(self, on_notice: Callable[[str], None]) -> None:
        """Calls `on_notice` once, with the cause, when there is a notice. Ends then, or where there is no source."""
        if self._config.source == "none":
            return
        self._source = await self._choose()
        if self._source is None:
            log.info("no cloud's metadata service here: preemption is noticed by SIGTERM alone")
            return
        log.info("watches for preemption notices from %s", self._source.name)
        self._notice = await self._first_notice(self._source)
        on_notice(str(self._notice))

    async def left(self) -> None:
        """To be called once the agent has left: tells the service, where it was asked to and there was a notice."""
        if self._source is None or self._notice is None:
            return
        try:
            async with asyncio.timeout(LEFT_S):
                await self._source.left(self._notice)
        except TROUBLES as error:
            log.warning("%s could not be told that this machine has left: %s", self._source.name, _words(error))

    async def _choose(self) -> NoticeSource | None:
        if self._own is not None:
            return self._own
        config = self._config
        metadata = Metadata(config.base_url)
        sources: dict[str, NoticeSource] = {
            "aws": Aws(metadata, config.rebalance),
            "gcp": Gcp(metadata),
            "azure": Azure(metadata, config.acknowledge),
        }
        if config.source != "auto":
            return sources[config.source]
        answers = await asyncio.gather(*(_present(source) for source in sources.values()))
        return next((source for source, there in zip(sources.values(), answers, strict=True) if there), None)

    async def _first_notice(self, source: NoticeSource) -> Notice:
        troubles, pause_s = 0, self._config.poll_s
        while True:
            try:
                notice = await source.look()
            except TROUBLES as error:
                troubles += 1
                pause_s = min(2 * pause_s, max(LONGEST_PAUSE_S, self._config.poll_s))
                if troubles & (troubles - 1) == 0:
                    log.warning(
                        "no answer about preemption from %s: %s (%d so far)", source.name, _words(error), troubles
                    )
            else:
                troubles, pause_s = 0, self._config.poll_s
                if notice is not None:
                    return notice
            await asyncio.sleep(pause_s)


async def _present(source: NoticeSource) -> bool:
    try:
        async with asyncio.timeout(PROBE_S):
            return await source.present()
    except TROUBLES as error:
        log.debug("not on %s: %s", source.name, _words(error))
        return False


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
