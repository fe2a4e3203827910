"""Python's garbage collector while a process of ours starts.

Importing PyTorch and transformers makes a million objects that all stay; with the interpreter's own thresholds looking
through them again and again for garbage is a fifth of a trainer's start-up.
"""

from __future__ import annotations

import gc

STARTING = (100_000, 50, 100)
"""New objects between two collections, and of those between two of the older generations, until it has begun."""
_OWN = gc.get_threshold()


def spare() -> None:
    """Collects seldom from now on. For a process that is a command's own."""
    gc.set_threshold(*STARTING)


def settle() -> None:
    """What is there now stays and is not looked through any more; what comes is collected as usual.

    Does nothing in a process that another program's is.
    """
    if gc.get_threshold() == STARTING:
        gc.freeze()
        gc.set_threshold(*_OWN)
