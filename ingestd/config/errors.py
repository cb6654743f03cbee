"""Faults of a config file, described for its author."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ingestd.config.interpolation import key_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.config.interpolation import Interpolator, KeyPath

_SECRET_KEYS = frozenset({"dsn", "mask_key", "storage_options", "token"})
_LONGEST_SHOWN = 40
_WORDS = {
    "missing": "is missing",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "list_type": "must be a list, like ['a', 'b']",
    "dict_type": "must be a section",
    "model_type": "must be a section",
    "model_attributes_type": "must be a section",
    "string_pattern_mismatch": "must match {pattern}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}


class KeyPathError(ValueError):
    """A fault of the key at `at`, found by a check of its complete section."""

    def __init__(self, at: KeyPath, why: str) -> None:
        super().__init__(why)
        self.at = at


@dataclass(frozen=True, slots=True)
class Problem:
    """A key at `at` that is refused, and `why`.

    `quotes`: whether the message quotes the value. `suggested`: the key that an unknown one is
    probably a misspelling of.
    """

    at: KeyPath
    why: str
    quotes: bool = False
    suggested: str = ""


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    at: KeyPath,
    section: Mapping[str, Any] = MappingProxyType({}),
) -> list[Problem]:
    """Translate a validation error of the section at `at`, whose model is `model`.

    `section`: as written. Keys it already has are not suggested.
    """
    found = []
    for fault in error.errors(include_url=False, include_input=False):
        context = fault.get("ctx", {})
        cause = context.get("error")
        where = (*at, *fault["loc"], *(cause.at if isinstance(cause, KeyPathError) else ()))
        kind = fault["type"]
        if kind == "extra_forbidden":
            place = fault["loc"][:-1]
            found.append(_unknown(where, _keys_at(model, place), _given_at(section, place)))
        elif kind == "literal_error":
            found.append(Problem(where, f"must be {context['expected']}", quotes=True))
        elif isinstance(cause, ValueError):
            quotes = not isinstance(cause, KeyPathError)
            found.append(Problem(where, str(cause), quotes=quotes))
        else:
            words = _WORDS.get(kind)
            found.append(Problem(where, words.format(**context) if words else fault["msg"]))
    suggested = {(*p.at[:-1], p.suggested) for p in found if p.suggested}
    return [p for p in found if not (p.why == _WORDS["missing"] and p.at in suggested)]


def describe(problems: Sequence[Problem], document: object, resolver: Interpolator) -> list[str]:
    """Return one line per problem, in the order found, each with the key's path. No secrets."""
    lines = []
    for problem in problems:
        if problem.at in resolver.errors and problem.why != resolver.errors[problem.at]:
            continue  # it would only report that 'env:NAME' is not a duration
        shown = _shown(problem, document, resolver)
        line = f"{key_path(problem.at)}: {problem.why}{shown}"
        if line not in lines:
            lines.append(line)
    return lines


def _given_at(section: object, place: tuple[int | str, ...]) -> Collection[str]:
    """Return the keys that are set in the section at `place` below `section`."""
    for part in place:
        section = section.get(part) if isinstance(section, Mapping) else None
    return section if isinstance(section, Mapping) else ()


def _unknown(at: KeyPath, keys: Sequence[str], given: Collection[str]) -> Problem:
    near = difflib.get_close_matches(
        str(at[-1]), sorted({*keys}.difference(given)), n=1, cutoff=0.5
    )
    if near:
        return Problem(at, f"unknown key; did you mean {near[0]!r}?", suggested=near[0])
    return Problem(at, f"unknown key; valid keys: {', '.join(keys)}")


def _keys_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section at `loc` below `model`."""
    annotation: Any = model
    for part in loc:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = _plain(annotation.model_fields[str(part)].annotation)
        else:  # dict[str, Section]: `part` is a name that the user chose
            annotation = typing.get_args(annotation)[1]
    return list(annotation.model_fields)


def _plain(annotation: Any) -> Any:  # noqa: ANN401 - annotations have no common type
    if isinstance(annotation, types.UnionType):
        return next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _shown(problem: Problem, document: object, resolver: Interpolator) -> str:
    """Return the quoted value, or nothing if it is or may be a secret."""
    at = problem.at
    referenced = any(at[: len(path)] == path for path in resolver.values)
    if not problem.quotes or referenced or _SECRET_KEYS.intersection(map(str, at)):
        return ""
    value: Any = document
    for part in at:
        if not isinstance(value, dict | list):
            return ""
        value = value[part]  # type: ignore[index] # a key path of the same document
    if isinstance(value, str | int | float) and len(str(value)) <= _LONGEST_SHOWN:
        return f" (not {value!r})"
    return ""
