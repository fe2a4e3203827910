"""Environments: conversations of several turns of the model with tools, tasks or programs (docs/environments.md)."""

from penstock.environments.conversation import Conversation, Limits
from penstock.environments.host import EnvironmentHost
from penstock.environments.load import load_environment
from penstock.environments.protocol import Environment, Observation, Turn
from penstock.environments.text import Reply, TextEnvironment, TurnTemplate

__all__ = [
    "Conversation",
    "Environment",
    "EnvironmentHost",
    "Limits",
    "Observation",
    "Reply",
    "TextEnvironment",
    "Turn",
    "TurnTemplate",
    "load_environment",
]
