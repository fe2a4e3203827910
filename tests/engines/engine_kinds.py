"""What the contract tests have to know of each kind of engine server: how its CPU build is started here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from penstock.instance.dialects import dialect_of
from penstock.instance.served import ServedEngine
from penstock.instance.supervise import ManagedServer

ENGINES = os.environ.get("PENSTOCK_ENGINES", "")
"""A folder with a virtual environment for each kind of engine: vllm, sglang."""
CONTEXT = 1024
START_S = 900.0


@dataclass(frozen=True)
class Kind:
    options: dict[str, str]
    running_metric: str
    """At /metrics: requests that the server decodes now."""
    environment: dict[str, str] = field(default_factory=dict)
    seeds: bool = True
    """Whether it draws by a sequence's seed on CPU."""


KINDS = {
    "vllm": Kind({"enforce-eager": ""}, "vllm:num_requests_running", {"VLLM_CPU_KVCACHE_SPACE": "1"}),
    # Its deterministic inference, which draws by seeds, has kernels for accelerators only.
    "sglang": Kind({"enable-metrics": ""}, "sglang:num_running_reqs", seeds=False),
}


def installed() -> list[str]:
    """The kinds for which there is an environment."""
    return [kind for kind in KINDS if (Path(ENGINES) / kind / "bin" / "python").exists()]


def managed_server(kind: str, folder: Path) -> ManagedServer:
    """A server of this kind that logs to `folder`."""
    path = f"{Path(ENGINES).absolute() / kind / 'bin'}:{os.environ['PATH']}"
    return ManagedServer(
        dialect_of(kind),
        folder / f"{kind}.log",
        options=KINDS[kind].options,
        start_s=START_S,
        environment={**KINDS[kind].environment, "PATH": path},
    )


def managed_engine(kind: str, folder: Path) -> ServedEngine:
    """An engine that will start its server, with room for eight sequences of `CONTEXT` tokens."""
    return ServedEngine(dialect_of(kind), managed_server(kind, folder), max_running=8, max_context_tokens=CONTEXT)
