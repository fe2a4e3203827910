"""Names of algorithms that a configuration may give, known without PyTorch so that a wrong one is told at once.

The functions are in `train`; a test there keeps these lists and its registries the same.
"""

from __future__ import annotations

import difflib

__all__ = ["ADVANTAGES", "LOSSES", "known_name"]

ADVANTAGES = (
    "grpo",
    "grpo_passk",
    "dr_grpo",
    "rloo",
    "opo",
    "remax",
    "gae",
    "gdpo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
)
LOSSES = ("ppo_clip", "gspo", "cispo", "geo_mean", "sapo", "gpg", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")


def known_name(key: str, name: str, names: tuple[str, ...]) -> str:
    """`name`, where it is one of `names` or an import path. Raises ValueError with what is allowed."""
    if name in names or ":" in name:
        return name
    close = difflib.get_close_matches(name, names, n=2)
    guess = f"; did you mean {' or '.join(close)}?" if close else "."
    raise ValueError(
        f"{key}={name!r} is unknown{guess} There are: {', '.join(names)}; a function of your own is named by its "
        "import path, 'package.module:function'"
    )
