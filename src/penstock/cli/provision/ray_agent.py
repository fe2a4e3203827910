"""The actor that is a machine: one `penstock join` on whatever node Ray has put it. Its workers import this module."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

__all__ = ["AgentHost"]

TAIL_BYTES = 300
"""Of what an agent said last."""


class AgentHost:
    """`words`: for `penstock`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words, "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def ended(self) -> str:
        """Empty while the agent runs; else how it ended."""
        code = self._process.poll()
        if code is None:
            return ""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - TAIL_BYTES))
        tail = " ".join(self._said.read().decode(errors="replace").split())
        return f"its agent ended with exit code {code}" + (f"; last words: {tail}" if tail else "")

    def stop(self, leave_s: float) -> None:
        """SIGTERM, and SIGKILL where that does not help in time."""
        self._process.terminate()
        try:
            self._process.wait(leave_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
