"""The settings models of each kind of capture, for `[sources.NAME]` sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from ingestd.config import UNSTREAMED, SourceSettings, TableSettings
from ingestd.config.errors import KeyPathError
from ingestd.config.units import Seconds, SecondsOrOff, SecondsOrZero, SizeBytes, SizeOrZero
from ingestd.model.schema import TableId

_MAX_IDENTIFIER_BYTES = 63
"""NAMEDATALEN - 1 of a standard server."""

SECRET_PARTS = (
    "password",
    "sslpassword",
    "oauth_client_secret",
    "scram_client_key",
    "scram_server_key",
)
"""Of a DSN. Source: PostgreSQL documentation, "Parameter Key Words"."""

SlotName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")]
"""Source: PostgreSQL, ReplicationSlotValidateName."""


def _identifier(name: str) -> str:
    if not 1 <= len(name.encode()) <= _MAX_IDENTIFIER_BYTES:
        msg = f"must be 1-{_MAX_IDENTIFIER_BYTES} bytes long"
        raise ValueError(msg)
    return name


Identifier = Annotated[str, AfterValidator(_identifier)]


class PostgresSettings(SourceSettings):
    """The settings shared by all captures of a Postgres database.

    `discover_interval`: interval in seconds of the catalog polls for new and altered tables.
    `snapshot_chunk`: approximate bytes of a table that are read at a time.
    """

    snapshot: Literal["initial", "never"] = "initial"
    """initial copies existing rows, then follows changes; never only follows changes. Changing this
    does not read tables that are already followed: run `ingestd snapshot` for that."""
    snapshot_workers: int = Field(default=2, ge=1, le=64)
    """How many connections read a snapshot."""
    snapshot_chunk: SizeBytes = 32_000_000
    """About how much of a table is read at a time; twice as much for a consistent snapshot."""
    lake_lost: Literal["stop", "resnapshot"] = "stop"
    """When the lake is empty, a different one or an older copy, though the source was already read:
    stop until the lake is back, or restart with what is in the lake."""
    on_rewrite: Literal["resnapshot", "record"] = "resnapshot"
    """When DDL rewrites row values, which produces no changes: re-snapshot the table, or only
    record the event."""
    discover_interval: Seconds = 15.0
    """How often the catalog is polled for new and altered tables."""

    @property
    def sent_by(self) -> str | None:
        """The publication that determines what is sent; None: all that can be read."""
        return None

    @property
    def may_publish(self) -> bool:
        """Return whether ingestd may alter the publication to match the config."""
        return False

    @property
    def keeps_old_rows(self) -> bool:
        """Return whether `_cdc_before` has complete rows, where the source sends them."""
        return False

    def secrets(self) -> list[str]:
        """Return the secret values, with the passwords that libpq finds in the DSN."""
        parts = conninfo_to_dict(self.dsn.get_secret_value())
        return [*super().secrets(), *(str(parts[n]) for n in SECRET_PARTS if n in parts)]

    @field_validator("dsn")
    @classmethod
    def _readable_dsn(cls, dsn: SecretStr) -> SecretStr:
        try:
            parts = conninfo_to_dict(dsn.get_secret_value())
        except psycopg.ProgrammingError:
            # libpq's message quotes parts of the string, which may be the password
            msg = "not a connection string; write 'host=... dbname=...' or 'postgresql://...'"
            raise ValueError(msg) from None
        if "replication" in parts:
            msg = "leave 'replication' out; ingestd sets it where it is needed"
            raise ValueError(msg)
        return dsn


class WalSettings(PostgresSettings):
    """`kind = "wal"`: a logical replication slot and a publication (design section 4).

    `snapshot_chunked_above`: tables of more bytes are read incrementally in their first snapshot,
    too. `catch_up_above`: with more bytes of WAL than this to read, the backlog is first drained by
    SQL functions. Below that, streaming is as fast, because a call returns nothing until it is
    complete. `catch_up_slots`: number of temporary slots that decode parts of the backlog at a
    time. `catch_up_part`: approximate bytes of WAL in each part, whose changes the server keeps in
    temporary files meanwhile. `open_transaction_spool`: the server sends large transactions
    before they commit, and up to this many bytes of them are kept; 0: it sends them after commit.
    """

    kind: Literal["wal"]
    """A logical replication slot and a publication."""
    slot: SlotName
    """The replication slot; `ingestd_<source>` if not set."""
    publication: Identifier
    """The publication; `ingestd_<source>` if not set."""
    manage: bool = True
    """true: slot and publication are created and altered; false: they must exist."""
    snapshot_chunked_above: SizeOrZero = 1_000_000_000
    """Tables above this size are also read incrementally in their first snapshot; 0: all that have
    a key."""
    catch_up_above: SizeOrZero = 64_000_000
    """With more WAL than this to read, the backlog is first drained by SQL functions."""
    catch_up_slots: int = Field(default=2, ge=1, le=16)
    """How many temporary slots decode parts of a backlog at the same time."""
    catch_up_part: SizeBytes = 3_000_000_000
    """About how much WAL a part has; the server keeps its changes in temporary files."""
    open_transaction_spool: SizeOrZero = 0
    """How much of open transactions may be kept; 0: the server sends them after they commit."""
    before: Literal["key", "full"] = "key"
    """Old rows sent with updates and deletes: key, or full (needs REPLICA IDENTITY FULL)."""
    ddl_log: Literal["catalog", "event_trigger"] = "catalog"
    """How DDL is detected: by catalog polls every `discover_interval`, or also by event triggers in
    the database, which log it in the WAL at its exact position (docs/ddl.md)."""
    slot_lost: Literal["resnapshot", "stop"] = "resnapshot"
    """When the slot is lost: re-snapshot all tables, or stop until an operator acts."""

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Return default names of slot and publication, derived from the source's name."""
        return {"slot": f"ingestd_{source}", "publication": f"ingestd_{source}"}

    def exclusive(self) -> tuple[str, object]:
        """Return the slot: it can have only one reader."""
        return "slot", (self.slot, self.dsn.get_secret_value())

    @property
    def sent_by(self) -> str:
        """The publication."""
        return self.publication

    @property
    def may_publish(self) -> bool:
        """Return `manage`."""
        return self.manage

    @property
    def logs_ddl(self) -> bool:
        """Return whether event triggers log DDL."""
        return self.ddl_log == "event_trigger"

    @property
    def keeps_old_rows(self) -> bool:
        """Return whether `before` is full."""
        return self.before == "full"


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _column_names(names: list[str]) -> list[str]:
    if not names or not all(names):
        msg = "is empty; write a column's name, or a list of them"
        raise ValueError(msg)
    if len(set(names)) < len(names):
        msg = "names a column twice"
        raise ValueError(msg)
    return names


ColumnNames = Annotated[list[str], AfterValidator(_column_names)]


class PolledTableSettings(TableSettings):
    """The section of a polled source's table. Columns are named as in the source; times in seconds.

    `cursor`: the column that grows whenever a row is written, and tie-breakers for rows that are
    equal in it; none: every poll scans the complete table. `key`: the columns that identify a row,
    by default the primary key. `detect_deletes`: how often its keys are compared with the lake's;
    None for never. `deleted`: the column that is neither null nor false in a row that counts as
    deleted. `interval`: how often the table is polled, instead of the source's interval.
    """

    cursor: Annotated[ColumnNames, BeforeValidator(_one_or_more)] | None = None
    """The column that grows whenever a row is written, and tie-breakers for rows that are equal in
    it; none: every poll scans the complete table."""
    key: ColumnNames | None = None
    """The columns that identify a row; the primary key if not set."""
    detect_deletes: SecondsOrOff = None
    """How often the keys are compared with those in the lake."""
    deleted: Identifier | None = None
    """A column that is neither null nor false in a row that counts as deleted."""
    interval: Seconds | None = None
    """How often this table is polled, instead of the source's interval."""

    @model_validator(mode="after")
    def _pollable(self) -> PolledTableSettings:
        if self.reference in UNSTREAMED:
            for name in ("cursor", "detect_deletes", "deleted", "interval"):
                if getattr(self, name) is not None:
                    why = (
                        f"is not used with reference = {self.reference!r}, which captures no "
                        "changes; remove it"
                    )
                    raise KeyPathError((name,), why)
        for number, column in enumerate(self.key or ()):
            at = ("key", number)
            if column in self.exclude_columns:
                why = "is also in 'exclude_columns'; rows can't be distinguished without it"
                raise KeyPathError(at, why)
            if self.mask_columns.get(column) == "null":
                why = "is masked with null, and rows can't be distinguished without it; use sha256"
                raise KeyPathError(at, why)
            if column == self.deleted:
                raise KeyPathError(at, "is also 'deleted', which changes when a row is deleted")
        return self


NOT_DESCRIBED = PolledTableSettings()
"""The settings of a polled table that has no section."""


class PollingSettings(PostgresSettings):
    """`kind = "polling"`: ordinary queries, on any server and with any role that may read.

    Times are in seconds. `interval`: how often each table is polled while it changes. `page_rows`:
    rows per query. `statement_timeout`, `lock_timeout`: for each query of a poll, 0 for none.
    `listen`: a NOTIFY channel that starts a poll at once.
    """

    kind: Literal["polling"]
    """Ordinary queries, on any server and with any role that may read."""
    interval: Seconds = 10.0
    """How often each table is polled while it changes; a quiet one less, down to a tenth as
    often."""
    statement_timeout: SecondsOrZero = 60.0
    """Longest run time of a poll's query; 0 for no limit."""
    lock_timeout: SecondsOrZero = 5.0
    """Longest time a poll's query waits for a lock; 0 for no limit."""
    page_rows: int = Field(default=10_000, ge=1, le=10_000_000)
    """Rows per query."""
    listen: Identifier | None = None
    """A NOTIFY channel that starts a poll at once; not on a standby."""
    table: Mapping[str, PolledTableSettings] = {}
    """Settings of single tables: one section each, by `"schema.table"`."""

    def controls(self, table: TableId) -> PolledTableSettings:
        """Return the settings of a table: its section, or the defaults."""
        found = (s for text, s in self.table.items() if TableId.parse(text) == table)
        return next(found, NOT_DESCRIBED)


SETTINGS: Mapping[str, type[SourceSettings]] = {"wal": WalSettings, "polling": PollingSettings}
"""The settings model of each `kind`, for `ingestd.config.load_config`."""
