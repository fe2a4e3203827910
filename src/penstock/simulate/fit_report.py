"""A fitted profile as a file that says how well it fits, as lines for a person, and as JSON. Decides nothing."""

from __future__ import annotations

from typing import Any

from penstock.config.toml import write_toml
from penstock.simulate.fit import Fitted

__all__ = ["as_json", "as_text", "as_toml"]


def as_toml(fitted: Fitted, source: str) -> str:
    """A profile to load again; what is known of its errors stands at the top."""
    head = [f"# Fitted from {source}.", *(f"# {line}" for line in _lines(fitted))]
    return "\n".join([*head, "", write_toml(fitted.profile.model_dump(mode="json"))])


def as_text(fitted: Fitted) -> str:
    return "\n".join(_lines(fitted))


def as_json(fitted: Fitted) -> dict[str, Any]:
    return {
        "profile": fitted.profile.model_dump(mode="json"),
        "residuals": {
            kind: {
                "instances": fitted.members[kind],
                "rows": solution.rows,
                "median": solution.median_residual,
                "worst": solution.worst_residual,
            }
            for kind, solution in fitted.residuals.items()
        },
        "notes": fitted.notes,
    }


def _lines(fitted: Fitted) -> list[str]:
    lines = []
    for kind, solution in fitted.residuals.items():
        names = ", ".join(fitted.members[kind])
        lines.append(
            f"{kind} ({names}): {solution.rows} rows, off by {solution.median_residual:.1%} in the middle and "
            f"{solution.worst_residual:.1%} at worst"
        )
    return lines + [f"note: {note}" for note in fitted.notes]
