"""Where metrics are drawn by others' programs: TensorBoard's files, and Weights & Biases.

Decides that neither can stop a run: what can't be written is a warning, once, and that board is off. Refuses to know
what the figures mean. Keys for a service come from the environment and are written nowhere.
"""

from __future__ import annotations

import json
import math
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from penstock.errors import ConfigError, MissingExtra, StorageError

__all__ = ["Board", "TensorBoard", "Wandb"]

INIT_S = 60.0
"""For Weights & Biases to answer when a run begins; meanwhile the run goes on, and what it says waits."""
FINISH_S = 10.0
"""For what is left to be sent when a run ends; offline files have it all anyway."""
WAITING = 1000
"""Most lines that wait for a board that doesn't take them."""


class Board(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Raises MissingExtra without the package."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard", "observe.tensorboard = true") from error
        self._warn = warn
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError as error:
            self._writer = None
            self._warn(f"TensorBoard's files can't be written ({error.strerror or error}); it is switched off")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class Wandb:
    """A run at Weights & Biases, `mode` "online" or "offline" (files in `folder`/wandb, for `wandb sync`).

    Its id is kept in `folder`, so that a resumed run goes on in the same one. All that the package does happens on a
    thread of its own. Raises MissingExtra without it, ConfigError where "online" has no key, StorageError where the
    id can't be kept.
    """

    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        *,
        mode: str,
        project: str,
        entity: str = "",
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb", f'observe.wandb = "{mode}"') from error
        if mode == "online" and not environment.get("WANDB_API_KEY"):
            raise ConfigError('observe.wandb="online" needs a key in WANDB_API_KEY; "offline" needs none')
        self._package: Any = wandb
        self._warn = warn
        self._lines: queue.Queue[dict[str, float] | None] = queue.Queue(WAITING)
        self._off = False
        self._ended = threading.Event()
        options = {
            "project": project,
            "entity": entity or None,
            "id": _kept_id(folder / "wandb.json"),
            "resume": "allow",
            "mode": mode,
            "dir": str(folder),
            "name": folder.name,
            "config": dict(config or {}),
            "settings": wandb.Settings(console="off", silent=True, init_timeout=INIT_S),
        }
        # A daemon: whatever the network does, the process can end.
        threading.Thread(target=self._send, args=(options,), name="wandb", daemon=True).start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._off:
            return
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        try:
            # Steps are a column of their own: a resumed run says some of them again, which its own counter refuses.
            self._lines.put_nowait({"step": float(step), **finite})
        except queue.Full:
            self._switch_off(f"{WAITING} lines wait for it")

    def close(self) -> None:
        if not self._off:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                self._switch_off(f"{WAITING} lines wait for it")
        if not self._ended.wait(FINISH_S):
            self._switch_off(f"not everything was sent within {FINISH_S:g} s")

    def _send(self, options: dict[str, Any]) -> None:
        try:
            run = self._package.init(**options)
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            while (line := self._lines.get()) is not None:
                run.log(line)
            run.finish()
        # The package raises its own errors, those of its service and of the network; none is worth the run.
        except Exception as error:  # noqa: BLE001
            self._switch_off(f"{type(error).__name__}: {error}")
        finally:
            self._ended.set()

    def _switch_off(self, cause: str) -> None:
        if not self._off:
            self._off = True
            self._warn(f"Weights & Biases is switched off: {cause}")


def _kept_id(path: Path) -> str:
    """The run's id there, from now on the same one."""
    try:
        if path.exists():
            return str(json.loads(path.read_text())["id"])
        kept = uuid.uuid4().hex[:12]
        path.write_text(json.dumps({"id": kept}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} can't be read or written: {error}; remove it to begin another run there") from error
    return kept
