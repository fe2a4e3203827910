"""What a judging model is shown of a sample: a template with {prompt}, {response} and {row.FIELD}, or a function."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.sample import Sample

__all__ = ["Text", "Unshowable", "shown"]

Text = str | Callable[[Sample], str]
PLACE = re.compile(r"\{(prompt|response|row\.([A-Za-z0-9_]+))\}")


class Unshowable(Exception):
    """A sample lacks what the text is made of."""


def shown(text: Text, sample: Sample) -> str:
    """The text for one sample. Raises Unshowable."""
    if not isinstance(text, str):
        return text(sample)

    def filled(place: re.Match[str]) -> str:
        if place[1] == "response":
            return sample.response
        value = sample.prompt.text if place[1] == "prompt" else sample.row.get(place[2])
        if value is None or value == "":
            raise Unshowable(f"the sample has no {place[1]}, which the text needs")
        return str(value)

    return PLACE.sub(filled, text)
