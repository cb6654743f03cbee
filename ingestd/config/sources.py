"""The config sections of sources and their tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, model_validator

from ingestd.config.base import Secret, Section
from ingestd.config.errors import KeyPathError
from ingestd.config.interpolation import KeyPath
from ingestd.config.table_patterns import included
from ingestd.config.units import Seconds
from ingestd.model.schema import TableId


class TableSettings(Section):
    """`[sources.NAME.table."schema.table"]`. Columns are named as in the source.

    `exclude_columns` never reach the lake. Of `mask_columns`, only a keyed hash does, or nothing.
    `types`: lake types, in the syntax of `ingestd.decode.type_mapping.override_type`. `reference`:
    whether and how the lake keeps the table's current rows (docs/reference-tables.md). `refresh`:
    the interval in seconds at which "snapshot_only" reads them.
    """

    exclude_columns: list[str] = Field(default_factory=list)
    """Columns that are never read and never stored in the lake."""
    mask_columns: dict[str, Literal["sha256", "null"]] = Field(default_factory=dict)
    """Columns of which only a keyed hash reaches the lake (sha256), or nothing (null)."""
    types: dict[str, str] = Field(default_factory=dict)
    """Lake types that replace the default ones, by column (docs/types.md)."""
    reference: Literal["off", "snapshot_only", "snapshot_plus_cdc", "manual"] = "off"
    """Whether and how `_ref` keeps the table's current rows (docs/reference-tables.md)."""
    refresh: Seconds | None = None
    """How often a `snapshot_only` table is re-read; 1h if not set."""

    @property
    def hidden(self) -> frozenset[str]:
        """Columns whose values must not be visible as they are."""
        return frozenset([*self.exclude_columns, *self.mask_columns])

    @model_validator(mode="after")
    def _consistent(self) -> TableSettings:
        if self.refresh is not None and self.reference in {"snapshot_plus_cdc", "manual"}:
            why = f'applies to reference = "snapshot_only", not "{self.reference}"; remove it'
            raise KeyPathError(("refresh",), why)
        excluded = self.exclude_columns
        for number, column in enumerate(excluded):
            if column in excluded[:number]:
                raise KeyPathError(("exclude_columns", number), f"{column!r} is listed twice")
        for column, kind in self.mask_columns.items():
            if column in excluded:
                why = "is also in 'exclude_columns'; remove it from one of the two"
                raise KeyPathError(("mask_columns", column), why)
            if kind == "sha256" and column in self.types:
                why = "is masked with sha256, so its type is string; remove it from 'types'"
                raise KeyPathError(("types", column), why)
        for column in self.types:
            if column in excluded:
                why = "is also in 'exclude_columns'; remove it from one of the two"
                raise KeyPathError(("types", column), why)
        return self

    @property
    def refresh_s(self) -> float:
        """How often a "snapshot_only" table is re-read, in seconds."""
        return DEFAULT_REFRESH_S if self.refresh is None else self.refresh

    @property
    def hashed(self) -> tuple[str, ...]:
        """Names of the columns whose mask needs a key."""
        return tuple(c for c, kind in self.mask_columns.items() if kind == "sha256")


DEFAULT_REFRESH_S = 3600.0
UNSTREAMED = {"snapshot_only", "manual"}
"""With these references the lake keeps only the current rows."""
NO_CONTROLS = TableSettings()
"""The settings of a table that has no section."""


def _table_pattern(pattern: str) -> str:
    try:
        TableId.parse(pattern.removeprefix("!"))
    except ValueError:
        msg = "write it as schema.table, like 'public.*' or '!public.audit_*'"
        raise ValueError(msg) from None
    return pattern


TablePattern = Annotated[str, AfterValidator(_table_pattern)]


class SourceSettings(Section):
    """The keys of every kind of source; the model of a kind adds its own.

    `tables`: patterns ``schema.table`` with ``*``, ``?`` and ``[...]``; ``!`` excludes. A schema
    with a dot is quoted as in SQL. `mask_key`: the key of sha256 masks. `dsn` is checked by the
    model of the kind, which knows its syntax (`ingestd.postgres.settings.PostgresSettings`).
    """

    kind: str
    """How changes are captured."""
    dsn: Secret
    """A libpq connection string or URI."""
    tables: list[TablePattern] = Field(min_length=1)
    """What to capture: `schema.table` with `*`, `?` and `[...]`; `!` excludes."""
    mask_key: Secret | None = None
    """The key of sha256 masks; required if there are any."""
    table: Mapping[str, TableSettings] = {}
    """Settings of single tables: one section each, by `"schema.table"`."""

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Return the defaults that depend on the source's name."""
        del source
        return {}

    def includes(self, schema: str, name: str) -> bool:
        """Return whether `tables` includes this table: a pattern matches, and none excludes it."""
        return included(self.tables, schema, name)

    def streams(self, table: TableId) -> bool:
        """Return whether a table's changes are captured; of some, only current rows are kept."""
        return (
            self.includes(table.schema, table.name)
            and self.controls(table).reference not in UNSTREAMED
        )

    def controls(self, table: TableId) -> TableSettings:
        """Return the settings of a table: its section, or the defaults."""
        found = (s for text, s in self.table.items() if TableId.parse(text) == table)
        return next(found, NO_CONTROLS)

    def references(self) -> dict[TableId, TableSettings]:
        """Return the tables whose current rows the lake keeps."""
        return {TableId.parse(n): s for n, s in self.table.items() if s.reference != "off"}

    @property
    def mask_key_bytes(self) -> bytes | None:
        """The HMAC key: its text in UTF-8."""
        return None if self.mask_key is None else self.mask_key.get_secret_value().encode()

    def exclusive(self) -> tuple[str, object] | None:
        """Return a key that two sources must not share, and the value to compare."""
        return None

    def secrets(self) -> list[str]:
        """Return the values that must never be shown."""
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
                raise KeyPathError(at, f"is the same table as {seen[table]!r}; keep one of them")
            if settings.hashed and self.mask_key is None:
                why = "sha256 needs a key; set the source's 'mask_key', like 'env:MASK_KEY'"
                raise KeyPathError((*at, "mask_columns", settings.hashed[0]), why)
        return self
