"""What may be written in a configuration: walks the models and says it in words.

The one place that knows how a pydantic field is put into a sentence: its type, its bounds, its default, its help.
Refusals (`load`), `--help-config` and value parsing ask here, so they can't disagree with the models. Knows nothing
about files, overrides or any particular run.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

import annotated_types as bound
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

Path = tuple[str | int, ...]
"""Of a value in a configuration; list entries by number."""


@dataclass(frozen=True, slots=True)
class Place:
    """What stands at a path: its annotation (without `None`), and the field where it is one."""

    annotation: Any
    field: FieldInfo | None
    optional: bool

    @property
    def section(self) -> type[BaseModel] | None:
        """The model, where this is a section."""
        return self.annotation if _is_model(self.annotation) else None

    @property
    def entry(self) -> Any:
        """What a list's entries are, where this is a list."""
        return _list_entry(self.annotation)

    @property
    def is_flag(self) -> bool:
        return self.annotation is bool

    @property
    def is_text(self) -> bool:
        """Only text is allowed here, so `007` is text too."""
        if typing.get_origin(self.annotation) is Literal:
            return all(isinstance(choice, str) for choice in typing.get_args(self.annotation))
        return self.annotation is str


def dotted(path: Path) -> str:
    """`("data", "train", 0, "size")` as `data.train.0.size`."""
    return ".".join(str(part) for part in path)


def place_at(model: type[BaseModel], path: Path) -> Place | None:
    """What the models allow at a path, or None where they know of nothing."""
    place = Place(annotation=model, field=None, optional=False)
    for part in path:
        inner = _step(place, part)
        if inner is None:
            return None
        place = inner
    return place


def allowed(place: Place) -> str:
    """What may stand there, as the end of "must be ...": "a number above 0 and below 1", "one of a, b"."""
    words = _type_words(place.annotation)
    bounds = _bounds(place.field)
    if bounds:
        words = f"{words} {bounds[0]}" + "".join(f" and {word.removeprefix('of ')}" for word in bounds[1:])
    return f"{words}, or none" if place.optional else words


def keys(section: type[BaseModel], prefix: Path = ()) -> Iterator[tuple[str, Place]]:
    """Every key below a section, dotted, its own before inner sections'; list entries as `data.train.N.kind`."""
    inner: list[Iterator[tuple[str, Place]]] = []
    for name, field in section.model_fields.items():
        place = _place(field.annotation, field)
        path: Path = (*prefix, name)
        entry = _list_entry(place.annotation)
        if place.section is not None:
            inner.append(keys(place.section, path))
        elif _is_model(entry):
            inner.append(keys(entry, (*path, "N")))
        if place.section is None or place.optional:
            yield dotted(path), place
    for below in inner:
        yield from below


def describe(model: type[BaseModel]) -> str:
    """Every key with what is allowed, its default and its help: the text of `--help-config`."""
    lines: list[str] = []
    section_before = None
    for key, place in keys(model):
        section = key.rpartition(".")[0]
        if section != section_before:
            lines += ["", f"[{section}]" if section else "(top level)"]
            section_before = section
        lines.append(f"  {key}")
        lines.append(f"      {_capital(allowed(place))}. {_default_words(place)}")
        help_text = place.field.description if place.field is not None else None
        lines += [f"      {line.strip()}" for line in (help_text or "").splitlines()]
    return "\n".join(lines[1:])


def _step(place: Place, part: str | int) -> Place | None:
    if place.section is not None:
        field = place.section.model_fields.get(str(part))
        return None if field is None else _place(field.annotation, field)
    entry = _list_entry(place.annotation)
    if entry is not None and isinstance(part, int):
        return _place(entry, None)
    if typing.get_origin(place.annotation) is dict:
        return _place(typing.get_args(place.annotation)[1], None)
    return None


def _place(annotation: Any, field: FieldInfo | None) -> Place:
    inner, optional = annotation, False
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = typing.get_args(annotation)
        rest = [member for member in members if member is not type(None)]
        optional = len(rest) < len(members)
        if len(rest) == 1:
            inner = rest[0]
        elif optional:
            inner = Union[tuple(rest)]  # noqa: UP007 - built from a list that is only known here
    return Place(annotation=inner, field=field, optional=optional)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _list_entry(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) in (list, tuple) else None


_WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
}


def _type_words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} values, each {_type_words(arguments[0])}"
    if origin in (list, tuple):
        return f"a list, each entry {_type_words(arguments[0])}"
    if origin is dict:
        # What a value may be is only said where it's a word; a union of lists is for the refusal of one value.
        return f"a table, each value {_WORDS[arguments[1]]}" if arguments[1] in _WORDS else "a table"
    if origin in (Union, types.UnionType):
        return " or ".join(_type_words(member) for member in arguments)
    if _is_model(annotation):
        return f"a section with the keys {', '.join(annotation.model_fields)}"
    return getattr(annotation, "__name__", str(annotation))


def _bounds(field: FieldInfo | None) -> list[str]:
    words = []
    for constraint in field.metadata if field is not None else []:
        if isinstance(constraint, bound.Gt):
            words.append(f"above {constraint.gt}")
        elif isinstance(constraint, bound.Ge):
            words.append(f"of at least {constraint.ge}")
        elif isinstance(constraint, bound.Lt):
            words.append(f"below {constraint.lt}")
        elif isinstance(constraint, bound.Le):
            words.append(f"of at most {constraint.le}")
        elif isinstance(constraint, bound.MinLen):
            words.append(f"of at least {constraint.min_length} entr{'y' if constraint.min_length == 1 else 'ies'}")
    return words


def _default_words(place: Place) -> str:
    if place.field is None or place.field.default is PydanticUndefined:
        return "Required."
    default = place.field.default
    if default is None:
        return "Default: none."
    if isinstance(default, str):
        return f'Default: "{default}".' if default else "Default: empty."
    if isinstance(default, bool):
        return f"Default: {str(default).lower()}."
    return f"Default: {list(default) if isinstance(default, tuple) else default}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
