"""What a configuration says of training that its models can't judge: names of functions, and the device.

Decides whether the trainer could begin, before anything is started for it. The models themselves may not know what is
registered or installed (they are below this room and import nothing heavy).
"""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import MissingExtra
from penstock.train.registry import import_function

__all__ = ["check", "check_own_functions"]


def check_own_functions(config: RunConfig) -> None:
    """Imports the functions of one's own that the configuration names, before PyTorch is. Raises ConfigError."""
    for key, name in (("train.advantage", config.train.advantage), ("train.loss", config.train.loss)):
        if ":" in name:
            import_function(key, name)


def check(config: RunConfig) -> None:
    """Raises ConfigError naming the key, its value and what is allowed; MissingExtra without the train extra.

    Covers `train.advantage`, `train.loss` and `train.device`. Imports the modules that they name.
    """
    try:
        from penstock.train.actor import pick_device
        from penstock.train.advantages import get_advantage
        from penstock.train.policy_losses import get_loss
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "training") from error

    get_advantage(config.train.advantage)
    get_loss(config.train.loss)
    pick_device(config.train.device)
