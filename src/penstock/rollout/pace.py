"""How fast one peer may send: decides how long the manager does not read from it, and when it has gone too far.

Two token buckets, for frames and for bytes. A peer that is over is slowed by not being read, which its own socket
then feels; one that goes on at its limit for `patience_s` is given up. Pure: sizes and `now` in, seconds out.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Pace", "PaceConfig"]


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """Of one peer. The defaults are far above what an honest agent or trainer comes to."""

    frames_per_s: float = 5000.0
    bytes_per_s: float = 512.0 * 1024 * 1024
    burst_s: float = 2.0
    """So many seconds' worth may come at once."""
    patience_s: float = 20.0
    """A peer that is at its limit for so long without a pause is dropped."""


class Pace:
    """One peer's allowance."""

    def __init__(self, config: PaceConfig, now: float) -> None:
        self._config = config
        self._at = now
        self._frames = config.frames_per_s * config.burst_s
        self._bytes = config.bytes_per_s * config.burst_s
        self._limited_since: float | None = None

    def take(self, nbytes: int, now: float) -> float:
        """A frame of so many bytes has come; seconds for which nothing more is to be read."""
        config, passed = self._config, max(0.0, now - self._at)
        self._at = now
        self._frames = min(config.frames_per_s * config.burst_s, self._frames + passed * config.frames_per_s) - 1
        self._bytes = min(config.bytes_per_s * config.burst_s, self._bytes + passed * config.bytes_per_s) - nbytes
        wait_s = max(0.0, -self._frames / config.frames_per_s, -self._bytes / config.bytes_per_s)
        if wait_s > 0 and self._limited_since is None:
            self._limited_since = now
        elif self._frames > config.frames_per_s * config.burst_s / 2 and self._bytes > (
            config.bytes_per_s * config.burst_s / 2
        ):
            self._limited_since = None
        return wait_s

    def fault(self, now: float) -> str:
        """Why the peer is to be dropped; empty while it is not."""
        since = self._limited_since
        if since is None or now - since <= self._config.patience_s:
            return ""
        config = self._config
        return (
            f"it sent at its limit ({config.frames_per_s:g} frames and {config.bytes_per_s:g} bytes a second) for "
            f"{now - since:.1f} s without a pause"
        )
