"""One question to a metadata service: bounded in time and size, never through a proxy, never redirected."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from penstock.instance.preemption.notice import MetadataError

__all__ = ["LINK_LOCAL", "Answer", "Metadata"]

LINK_LOCAL = "http://169.254.169.254"
"""Where AWS, GCP and Azure all have it."""
ANSWER_S = 5.0
ANSWER_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    text: str
    headers: Mapping[str, str]


class Metadata:
    """The service at `base_url`."""

    def __init__(self, base_url: str = LINK_LOCAL) -> None:
        self._base_url = base_url.rstrip("/")

    async def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        json: object = None,
        answer_s: float | None = None,
    ) -> Answer:
        """Whatever status it has. Raises aiohttp's errors, OSError, TimeoutError or MetadataError."""
        # Questions are seconds apart: a connection for each leaves nothing to be closed in between.
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=answer_s or ANSWER_S)) as http:
            async with http.request(
                method, self._base_url + path, headers=headers, params=params, json=json, allow_redirects=False
            ) as response:
                body = bytearray()
                async for piece in response.content.iter_chunked(16 * 1024):
                    body += piece
                    if len(body) > ANSWER_BYTES:
                        raise MetadataError(f"the answer to {path} is over {ANSWER_BYTES} bytes")
                return Answer(response.status, body.decode(errors="replace").strip(), response.headers)
