"""The kinds of engine server that there are, each imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from penstock.errors import ConfigError
from penstock.instance.dialect import Dialect

DIALECTS: Mapping[str, str] = {
    "vllm": "penstock.instance.vllm:VllmDialect",
    "sglang": "penstock.instance.sglang:SglangDialect",
}
PROGRAMS: Mapping[str, str] = {"vllm": "vllm", "sglang": "sglang"}
"""What must be found on PATH for a server that the agent starts without a command of the user's."""


def dialect_of(kind: str) -> Dialect:
    """Raises ConfigError for a kind that there is not."""
    if kind not in DIALECTS:
        raise ConfigError(f"there is no engine server of kind {kind!r}; there are: {', '.join(DIALECTS)}")
    module, _, name = DIALECTS[kind].partition(":")
    return cast(Dialect, getattr(importlib.import_module(module), name)())
