"""docs/reference/configuration.md: every key of the config, from the models.

The meaning of a key is the text below its field (PEP 257: an attribute docstring). It is read from
the source, as obtaining it from pydantic (`use_attribute_docstrings`) would slow each start down.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
import typing
from typing import Any, Literal

from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from docs_site.markdown import MADE_BY, table
from ingestd.config import (
    DEFAULT_REFRESH_S,
    DEFAULT_TARGET_BYTES,
    CatalogSettings,
    Config,
    EpochSettings,
    HttpSettings,
    LakeSettings,
    LimitSettings,
    LogSettings,
    MaintenanceSettings,
    Section,
    SourceSettings,
    TableSettings,
)
from ingestd.config.units import (
    Address,
    seconds,
    seconds_or_off,
    seconds_or_zero,
    size_bytes,
    size_or_zero,
)
from ingestd.postgres.settings import (
    PolledTableSettings,
    PollingSettings,
    PostgresSettings,
    WalSettings,
)

_INTRO = """# Configuration

A TOML file: `ingestd run --config FILE`. [config.example.toml](../../config.example.toml) lists every
key with its default. Any string may be `env:NAME` or `file:PATH`; values from there are never
shown. Durations: `500ms`, `5s`, `1m`, `2h`, `7d`. Sizes: `64MB` is 64 000 000 bytes, `64MiB`
is 67 108 864. Unknown keys, wrong types and contradictions are refused, with the key's path, the
reason and the nearest valid key: `ingestd check` reports all of them at once.
"""
_SECTIONS: tuple[tuple[str, str, tuple[type[Section], ...]], ...] = (
    ("[lake]", "Where the tables are written.", (LakeSettings,)),
    ("[epoch]", "When an epoch closes.", (EpochSettings,)),
    ("[limits]", "What the process may use: [memory](../memory.md).", (LimitSettings,)),
    (
        "[maintenance]",
        "Work on the lake alongside the epochs: [maintenance](../maintenance.md).",
        (MaintenanceSettings,),
    ),
    (
        "[catalog]",
        "Names for the lake's tables in a catalog: [catalogs](../catalogs.md). None by default.",
        (CatalogSettings,),
    ),
    ("[http]", "Where the daemon serves HTTP, and for whom.", (HttpSettings,)),
    ("[log]", "Logs go to stderr.", (LogSettings,)),
    (
        "[sources.NAME]",
        "For every source. `NAME` is 1 to 55 of a-z, 0-9 and `_`; it becomes a folder of the lake.",
        (SourceSettings, PostgresSettings),
    ),
    ('[sources.NAME], kind = "wal"', "Also for a source read by its WAL.", (WalSettings,)),
    (
        '[sources.NAME], kind = "polling"',
        "Also for a source read by queries: [polling](../polling.md).",
        (PollingSettings,),
    ),
    (
        '[sources.NAME.table."schema.table"]',
        "Settings of one table; columns by the source's names.",
        (TableSettings,),
    ),
    (
        '[sources.NAME.table."schema.table"], kind = "polling"',
        "Also for a table that is polled.",
        (PolledTableSettings,),
    ),
)
_TYPES = {
    seconds: "duration",
    seconds_or_zero: 'duration or "0"',
    seconds_or_off: 'duration or "off"',
    size_bytes: "size",
    size_or_zero: 'size or "0"',
}
_DEFAULTS_BY_USE = {
    ("MaintenanceSettings", "target_file_size"): f'"{DEFAULT_TARGET_BYTES // 10**6}MB"',
    ("TableSettings", "refresh"): f'"{DEFAULT_REFRESH_S / 3600:g}h"',
    ("WalSettings", "slot"): '"ingestd_NAME"',
    ("WalSettings", "publication"): '"ingestd_NAME"',
}
"""Defaults that come from a validator or a property."""
_PAGE = re.compile(r"docs/([a-z-]+)\.md")
_UNITS_S = (("d", 86400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("ms", 0.001))
_UNITS_B = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))


def page() -> str:
    """Return the page. Raise KeyError for a key without a meaning."""
    parts = [MADE_BY, _INTRO]
    for title, what, models in _SECTIONS:
        rows = [row for model in models for row in _rows(model)]
        parts += [f"\n## {title}\n\n{what}\n\n", table(("key", "type", "default", "meaning"), rows)]
    return "".join(parts)


def covered() -> set[type[Section]]:
    """Return the models whose keys are on the page."""
    return {model for _, _, models in _SECTIONS for model in models} | {Config}


def _rows(model: type[Section]) -> list[tuple[str, str, str, str]]:
    meanings = attribute_docstrings(model)
    own = [n for n in inspect.get_annotations(model) if n in model.model_fields]
    if model is PollingSettings or model is WalSettings:
        own.remove("kind")
    if model is PollingSettings:
        own.remove("table")
    return [
        (f"`{name}`", _type(model, name), _default(model, name), meanings[name]) for name in own
    ]


def attribute_docstrings(model: type[Section]) -> dict[str, str]:
    """Return the texts below a model's fields."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    if not isinstance(tree, ast.ClassDef):
        raise TypeError(tree)
    found = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            said = " ".join(str(text.value.value).split())
            found[field.target.id] = _PAGE.sub(r"[\1](../\1.md)", said)
    return found


def _type(model: type[Section], name: str) -> str:
    hints = typing.get_type_hints(model, include_extras=True)
    if name == "kind" and hints[name] is str:
        return '"wal" or "polling"'
    limits = [
        f"at least {_limit(m.ge, hints[name])}"
        for m in model.model_fields[name].metadata
        if getattr(m, "ge", None) is not None
    ] + [
        f"at most {_limit(m.le, hints[name])}"
        for m in model.model_fields[name].metadata
        if getattr(m, "le", None) is not None
    ]
    return ", ".join([_words(hints[name]), *limits])


def _words(hint: Any) -> str:  # noqa: ANN401 - annotations have no common type
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        made_by = [getattr(extra, "func", None) for extra in arguments[1:]]
        known = [_TYPES[function] for function in made_by if function in _TYPES]
        return known[0] if known else _words(arguments[0])
    if origin in {typing.Union, types.UnionType}:
        kept = [_words(a) for a in arguments if a is not types.NoneType]
        return " or ".join(kept) + (' or "off"' if Address in arguments else "")
    if origin is Literal:
        return ", ".join(f'"{value}"' for value in arguments)
    if origin is list:
        return f"list of {_words(arguments[0])}s"
    if origin is not None and arguments:
        kind = _words(arguments[-1])
        return f"section of {kind}s" if kind.endswith("string") else f"section of {kind}"
    names = {
        bool: "true, false",
        int: "number",
        str: "string",
        SecretStr: "secret string",
        Address: '"host:port"',
    }
    return names.get(hint, "sections")


def _limit(bound: float, hint: Any) -> str:  # noqa: ANN401
    return _quantity(bound, _UNITS_B) if "size" in _words(hint) else f"{bound:,}"


def _default(model: type[Section], name: str) -> str:
    if found := _DEFAULTS_BY_USE.get((model.__name__, name)):
        return f"`{found}`"
    value, kind = (
        model.model_fields[name].get_default(call_default_factory=True),
        _type(model, name),
    )
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ({}, []):
        return '`"off"`' if '"off"' in kind else "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if "duration" in kind or "size" in kind:
        units = _UNITS_S if "duration" in kind else _UNITS_B
        return f'`"{_quantity(value, units)}"`'
    return f"`{value}`" if isinstance(value, int) else f'`"{value}"`'


def _quantity(value: float, units: typing.Sequence[tuple[str, float]]) -> str:
    unit, size = next(((u, s) for u, s in units if value >= s and value % s == 0), ("", 1))
    return f"{value / size:g}{unit}"
