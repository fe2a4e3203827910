"""The built-in engine; `penstock.instance.builtin.engine` has the engine, `.core` what runs inside its thread.

Imports nothing heavy itself; it only says what to install where PyTorch and its companions are missing.
"""

from importlib.util import find_spec

from penstock.errors import MissingExtra

for _package in ("torch", "numpy", "safetensors", "xxhash"):
    if find_spec(_package) is None:
        raise MissingExtra(_package, "engine", "the built-in engine")
