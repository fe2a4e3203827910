"""What all parts of a configuration have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    """Unknown keys are refused, defaults are checked, and the docstrings of fields are their help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, validate_default=True)
