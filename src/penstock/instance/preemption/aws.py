"""AWS: the spot instance-action notice (two minutes ahead) and, if asked for, the rebalance recommendation before it.

Instance metadata service, version 2: a token is fetched by PUT and goes with every question; 404 means no notice.
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
"""

from __future__ import annotations

import json

from penstock.instance.preemption.metadata import Metadata
from penstock.instance.preemption.notice import MetadataError, Notice

__all__ = ["Aws"]

TOKEN_TTL_S = 21600
TOKEN_BYTES = 1024


class Aws:
    """`rebalance`: a recommendation to rebalance (a raised risk, with no deadline) counts as a notice too."""

    name = "AWS"

    def __init__(self, metadata: Metadata, rebalance: bool = False) -> None:
        self._metadata = metadata
        self._rebalance = rebalance
        self._token = ""

    async def present(self) -> bool:
        await self._renew_token()
        return True

    async def look(self) -> Notice | None:
        action = await self._item("/latest/meta-data/spot/instance-action")
        if action is not None:
            return Notice(self.name, f"spot instance-action {_text(action, 'action')}", _text(action, "time"))
        if self._rebalance:
            advice = await self._item("/latest/meta-data/events/recommendations/rebalance")
            if advice is not None:
                return Notice(self.name, f"rebalance recommendation of {_text(advice, 'noticeTime')}")
        return None

    async def left(self, notice: Notice) -> None:
        """Nothing is told: the machine ends at its time."""

    async def _item(self, path: str) -> dict[str, object] | None:
        """A JSON object, or None for 404. A token that ran out is renewed once."""
        if not self._token:
            await self._renew_token()
        answer = await self._metadata.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            await self._renew_token()
            answer = await self._metadata.ask(path, headers={"X-aws-ec2-metadata-token": self._token})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataError(f"{path} is answered with HTTP status {answer.status}")
        try:
            item = json.loads(answer.text)
        except ValueError as error:
            raise MetadataError(f"{path} is not JSON: {answer.text[:80]!r}") from error
        if not isinstance(item, dict):
            raise MetadataError(f"{path} is no JSON object: {answer.text[:80]!r}")
        return item

    async def _renew_token(self) -> None:
        answer = await self._metadata.ask(
            "/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
        )
        token = answer.text
        if answer.status != 200 or not 0 < len(token) <= TOKEN_BYTES or not (token.isascii() and token.isprintable()):
            raise MetadataError(f"the request for a token is answered with HTTP status {answer.status}")
        self._token = token


def _text(item: dict[str, object], key: str) -> str:
    """A field that a notice has to have: what has none is not taken for a notice."""
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise MetadataError(f"a notice without {key!r}: {str(item)[:200]}")
    return value[:200]
