"""The sections of sources and of their tables."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from ingestd.config.base import Secret, Section
from ingestd.config.errors import KeyPathError
from ingestd.config.interpolation import KeyPath
from ingestd.config.units import Seconds
from ingestd.model.schema import TableId

if TYPE_CHECKING:
    from collections.abc import Sequence


class TableSettings(Section):
    """`[sources.NAME.table."schema.table"]`; columns by the source's names.

    `exclude_columns` never reach the lake. `mask_columns`: only a keyed hash of the value does, or
    nothing. `types`: the lake's type, as `ingestd.decode.type_mapping.override_type` reads it.
    `reference`: whether the lake keeps the table's current rows, and how they are kept
    (docs/reference-tables.md); `refresh`: how often, in seconds, "snapshot_only" reads them.
    """

    exclude_columns: list[str] = Field(default_factory=list)
    """Columns that are never read, and never in the lake."""
    mask_columns: dict[str, Literal["sha256", "null"]] = Field(default_factory=dict)
    """Columns of which only a keyed hash reaches the lake (sha256), or nothing (null)."""
    types: dict[str, str] = Field(default_factory=dict)
    """Lake types other than the usual ones, by column (docs/types.md)."""
    reference: Literal["off", "snapshot_only", "snapshot_plus_cdc", "manual"] = "off"
    """Whether `_ref` has the table's current rows, and how (docs/reference-tables.md)."""
    refresh: Seconds | None = None
    """How often a `snapshot_only` table is re-read; 1h if not set."""

    @property
    def hidden(self) -> frozenset[str]:
        """Columns whose values may not be seen as they are."""
        return frozenset([*self.exclude_columns, *self.mask_columns])

    @model_validator(mode="after")
    def _consistent(self) -> TableSettings:
        if self.refresh is not None and self.reference in {"snapshot_plus_cdc", "manual"}:
            why = f'is for reference = "snapshot_only", not "{self.reference}"; take it out'
            raise KeyPathError(("refresh",), why)
        excluded = self.exclude_columns
        for number, column in enumerate(excluded):
            if column in excluded[:number]:
                raise KeyPathError(("exclude_columns", number), f"{column!r} is named twice")
        for column, kind in self.mask_columns.items():
            if column in excluded:
                why = "is in 'exclude_columns' too; take it out of one of them"
                raise KeyPathError(("mask_columns", column), why)
            if kind == "sha256" and column in self.types:
                why = "is masked with sha256, which is a string; take it out of 'types'"
                raise KeyPathError(("types", column), why)
        for column in self.types:
            if column in excluded:
                why = "is in 'exclude_columns' too; take it out of one of them"
                raise KeyPathError(("types", column), why)
        return self

    @property
    def refresh_s(self) -> float:
        """How often a table with "snapshot_only" is read."""
        return DEFAULT_REFRESH_S if self.refresh is None else self.refresh

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the columns whose mask needs a key."""
        return tuple(c for c, kind in self.mask_columns.items() if kind == "sha256")


DEFAULT_REFRESH_S = 3600.0
UNSTREAMED = {"snapshot_only", "manual"}
"""Of these references only the current rows are in the lake."""
NO_CONTROLS = TableSettings()
"""What holds for a table without a section of its own."""


def _table_pattern(pattern: str) -> str:
    try:
        TableId.parse(pattern.removeprefix("!"))
    except ValueError:
        msg = "write it as schema.table, like 'public.*' or '!public.audit_*'"
        raise ValueError(msg) from None
    return pattern


TablePattern = Annotated[str, AfterValidator(_table_pattern)]


class SourceSettings(Section):
    """What every kind of source has; a kind's own model adds its keys.

    `tables`: patterns ``schema.table`` with ``*``, ``?`` and ``[...]``; ``!`` excludes. A schema
    with a dot is quoted as in SQL. `mask_key`: what masks of kind sha256 are keyed with.
    """

    kind: str
    """How changes are captured."""
    dsn: Secret
    """A libpq connection string or URI."""
    tables: list[TablePattern] = Field(min_length=1)
    """What to capture: `schema.table` with `*`, `?` and `[...]`; `!` excludes."""
    mask_key: Secret | None = None
    """What masks of kind sha256 are keyed with; required for them."""
    table: Mapping[str, TableSettings] = {}
    """Settings of single tables: a section each, by `"schema.table"`."""

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Return the defaults that depend on the source's name."""
        del source
        return {}

    def includes(self, schema: str, name: str) -> bool:
        """Return whether `tables` asks for this table: by one pattern, and excluded by none."""
        return included(self.tables, schema, name)

    def streams(self, table: TableId) -> bool:
        """Return whether a table's changes are captured: of some only the current rows are kept."""
        return (
            self.includes(table.schema, table.name)
            and self.controls(table).reference not in UNSTREAMED
        )

    def controls(self, table: TableId) -> TableSettings:
        """Return the settings of a table: those of its section, or the defaults."""
        found = (s for text, s in self.table.items() if TableId.parse(text) == table)
        return next(found, NO_CONTROLS)

    def references(self) -> dict[TableId, TableSettings]:
        """Return the tables whose current rows the lake keeps."""
        return {TableId.parse(n): s for n, s in self.table.items() if s.reference != "off"}

    @property
    def mask_key_bytes(self) -> bytes | None:
        """The key as HMAC takes it: its text in UTF-8."""
        return None if self.mask_key is None else self.mask_key.get_secret_value().encode()

    def exclusive(self) -> tuple[str, object] | None:
        """Name the key that no two sources may share, and what counts as the same."""
        return None

    def secrets(self) -> list[str]:
        """Return the values that nobody may see."""
        fields = (getattr(self, name) for name in type(self).model_fields)
        return [f.get_secret_value() for f in fields if isinstance(f, SecretStr)]

    @model_validator(mode="after")
    def _consistent(self) -> SourceSettings:
        if all(p.startswith("!") for p in self.tables):
            raise KeyPathError(("tables",), "only exclusions; add what to capture, like 'public.*'")
        seen: dict[TableId, str] = {}
        for text, settings in self.table.items():
            at: KeyPath = ("table", text)
            try:
                table = TableId.parse(text)
            except ValueError:
                raise KeyPathError(at, "write it as schema.table, like 'public.orders'") from None
            if not self.includes(table.schema, table.name):
                raise KeyPathError(at, "no pattern of 'tables' includes it")
            if seen.setdefault(table, text) != text:
                raise KeyPathError(at, f"is the table of {seen[table]!r} too; keep one of them")
            if settings.hashed and self.mask_key is None:
                why = "sha256 needs a key; set 'mask_key' of the source, like 'env:MASK_KEY'"
                raise KeyPathError((*at, "mask_columns", settings.hashed[0]), why)
        return self


def included(patterns: Sequence[str], schema: str, name: str) -> bool:
    """Return whether a table is in: by one pattern, and excluded by none."""

    def matches(pattern: str) -> bool:
        wanted = TableId.parse(pattern.removeprefix("!"))
        return fnmatchcase(schema, wanted.schema) and fnmatchcase(name, wanted.name)

    found = [p for p in patterns if matches(p)]
    return bool(found) and not any(p.startswith("!") for p in found)
