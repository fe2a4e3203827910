"""What a run writes down besides its events: metrics with the boards that are asked for, and the model at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.observe import events
from penstock.observe.boards import Wandb
from penstock.observe.metrics import MetricsLog
from penstock.train.checkpoint import find_checkpoint
from penstock.train.export import export_model

__all__ = ["open_metrics", "write_model"]

Emit = Callable[[events.Event], None]


def open_metrics(config: RunConfig, folder: Path, emit: Emit) -> MetricsLog:
    """Raises StorageError, and for a board that is asked for and not there MissingExtra or ConfigError."""
    observe = config.observe
    metrics = MetricsLog(
        folder / "metrics.jsonl", emit=emit, tensorboard=folder / "tensorboard" if observe.tensorboard else None
    )
    if observe.wandb != "off":
        metrics.add(
            Wandb(
                folder,
                metrics.warn,
                mode=observe.wandb,
                project=observe.wandb_project,
                entity=observe.wandb_entity,
                config=config.model_dump(mode="json"),
            )
        )
    return metrics


def write_model(folder: Path, emit: Emit) -> None:
    """A run's last checkpoint as a model folder. It can be made again, so that its failure spoils nothing."""
    try:
        model = export_model(find_checkpoint(folder), folder / "model")
        emit(events.Noted(ts=time.time(), message=f"the trained model is in {model}"))
    except PenstockError as error:
        emit(events.Warned(ts=time.time(), where="export", message=str(error)))
