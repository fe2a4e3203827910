"""What a model's folder says of itself, for servers that read their weights from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def config_in(folder: Path) -> Mapping[str, Any]:
    """A model folder's config.json; empty where the model is no folder of this machine."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def dtype_in(folder: Path) -> str:
    """The weights' own: `auto` makes bfloat16 of float32, and the trainer's figures would not be the engine's."""
    config = config_in(folder)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
    return dtype if dtype in DTYPES else "auto"
