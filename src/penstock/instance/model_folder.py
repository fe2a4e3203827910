"""What a model's folder says of itself, for servers that read their weights from one."""

from __future__ import annotations

import json
import os
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


def config_of(model: str) -> Mapping[str, Any]:
    """Of a model as servers name it: a folder, or a name in this machine's Hugging Face cache; empty where neither."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
    return config_in(Path(model)) or (config_in(snapshots[-1]) if snapshots else {})


def dtype_in(folder: Path) -> str:
    """The weights' own: `auto` makes bfloat16 of float32, and the trainer's figures would not be the engine's."""
    config = config_in(folder)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "auto")
    return dtype if dtype in DTYPES else "auto"


def quantization_in(config: Mapping[str, Any]) -> str:
    """What the weights of a config.json are quantized by, such as `compressed-tensors int-quantized`; empty: floats."""
    said = config.get("quantization_config")
    if not isinstance(said, dict) or not said:
        return ""
    return " ".join(str(said[key]) for key in ("quant_method", "format") if said.get(key)) or "something unknown"
