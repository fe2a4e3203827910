"""Whether this machine has a device that engine servers compute on, told without loading anything of theirs."""

from __future__ import annotations

from pathlib import Path

DEVICE_NODES = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/davinci_manager", "/dev/dri/renderD128")


def has_accelerator() -> bool:
    return any(Path(node).exists() for node in DEVICE_NODES)
