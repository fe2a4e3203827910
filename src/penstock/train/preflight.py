"""What a configuration says of training that its models can't judge: names of functions, and the device.

Decides whether the trainer could begin, before anything is started for it. The models themselves may not know what is
registered or installed (they are below this room and import nothing heavy).
"""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.errors import MissingExtra

__all__ = ["check"]


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
