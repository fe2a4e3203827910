"""The kinds of error that Penstock raises.

Every message says what was wrong, with which value, and what to do about it. Callers catch `PenstockError`
for anything that is the user's or the environment's doing; everything else is a bug in Penstock.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors with a message meant for a person."""


class ConfigError(PenstockError):
    """A run's configuration has an unknown key or an impossible value."""


class PolicyError(PenstockError):
    """A policy of the user's own raised, or gave an answer that can't be followed."""


class DataError(PenstockError):
    """A prompt source is missing or one of its rows is malformed; names file and line."""


class CheckpointError(PenstockError):
    """A model folder or checkpoint is missing, broken or does not fit."""


class RankLost(PenstockError):
    """A rank of a run that torchrun started has ended, and the others can't go on without it."""


class StorageError(PenstockError):
    """The disk refused a write that the run needs (full, read-only, failing)."""


class MissingExtra(PenstockError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package '{package}', which is not installed; "
            f"install it with: pip install 'penstock[{extra}]'"
        )
        self.package = package
        self.extra = extra


class WireError(PenstockError):
    """A peer sent something that is not a frame of this protocol."""


class FrameTooLarge(WireError):
    """A frame is over the configured size limit."""


class ProtocolMismatch(WireError):
    """A peer speaks another version of the protocol."""


class AuthError(PenstockError):
    """A peer's token is missing or wrong."""


class EngineError(PenstockError):
    """An engine can't do what it was asked."""


class PromptTooLong(EngineError):
    """A prompt, with its prefix, leaves no room in the engine's context."""


class WeightError(PenstockError):
    """A weight version can't be fetched or does not verify."""


class RewardError(PenstockError):
    """A reward function can't be loaded or is declared wrongly."""


class EnvironmentFault(PenstockError):
    """An environment raised, was too late, or answered with what the protocol doesn't allow."""


class PoolError(PenstockError):
    """A job of the compute pool got no answer; its kinds, in `penstock.reward.failures`, say why."""


class RolloutError(PenstockError):
    """A batch of samples can't be completed; says why and what is missing."""


class DeadlineExceeded(RolloutError):
    """A wait went past its deadline; the message names what was waited for."""


class ProvisionError(PenstockError):
    """A provisioner can't add, release or list machines."""


class PortInUse(PenstockError):
    """The address a server was told to listen on is taken."""
