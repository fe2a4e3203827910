"""Instances: whatever generates tokens for a run, behind one engine protocol and one agent.

The built-in engine needs PyTorch and is imported by its own path, `penstock.instance.builtin.engine`.
"""

from penstock.instance.agent import Agent
from penstock.instance.engine import (
    Engine,
    EngineInfo,
    EngineLoad,
    SequenceStart,
    TokenDelta,
)
from penstock.instance.paced import PacedEngine

__all__ = [
    "Agent",
    "Engine",
    "EngineInfo",
    "EngineLoad",
    "PacedEngine",
    "SequenceStart",
    "TokenDelta",
]
