"""Settings of the kinds of capture: what a `[sources.NAME]` section may say."""

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
    """What every capture of a Postgres database is told.

    `discover_interval`: how often, in seconds, the catalog is asked for tables that are new or
    others than before. `snapshot_chunk`: about how many bytes of a table are read at a time.
    """

    snapshot: Literal["initial", "never"] = "initial"
    """initial copies what the tables hold, then follows; never only follows. A table that is
    followed already is not read because this was changed: `ingestd snapshot` does that."""
    snapshot_workers: int = Field(default=2, ge=1, le=64)
    """How many connections read a snapshot."""
    snapshot_chunk: SizeBytes = 32_000_000
    """About how much of a table is read at a time; twice as much at one point."""
    lake_lost: Literal["stop", "resnapshot"] = "stop"
    """When the lake is empty, another one or an older copy, though the source was read: stop until
    it is back, or begin again with what is there."""
    on_rewrite: Literal["resnapshot", "record"] = "resnapshot"
    """When DDL gives rows other values, which no change tells of: read the table again, or record
    it."""
    discover_interval: Seconds = 15.0
    """How often the catalog is asked for tables that are new or others than before."""

    @property
    def sent_by(self) -> str | None:
        """The publication that says what is captured of a table; None: all that can be read."""
        return None

    @property
    def may_publish(self) -> bool:
        """Whether the publication is altered to what the config asks for."""
        return False

    @property
    def keeps_old_rows(self) -> bool:
        """Whether `_cdc_before` is to have whole rows, where the source sends them."""
        return False

    def secrets(self) -> list[str]:
        """Return the values that nobody may see; of the DSN, its passwords as libpq reads them."""
        parts = conninfo_to_dict(self.dsn.get_secret_value())
        return [*super().secrets(), *(str(parts[n]) for n in SECRET_PARTS if n in parts)]

    @field_validator("dsn")
    @classmethod
    def _readable_dsn(cls, dsn: SecretStr) -> SecretStr:
        try:
            parts = conninfo_to_dict(dsn.get_secret_value())
        except psycopg.ProgrammingError:
            # libpq's words quote parts of the string, and they may be the password
            msg = "not a connection string; write 'host=... dbname=...' or 'postgresql://...'"
            raise ValueError(msg) from None
        if "replication" in parts:
            msg = "leave 'replication' out; ingestd sets it where it is needed"
            raise ValueError(msg)
        return dsn


class WalSettings(PostgresSettings):
    """`kind = "wal"`: a logical replication slot and a publication (design section 4).

    `snapshot_chunked_above`: a table of so many bytes is read in chunks at its first load too.
    `catch_up_above`: with more bytes of WAL than this to read, a backlog is drained first, by SQL
    functions. With less to read streaming is as fast: nothing comes until a call is done.
    `catch_up_slots`: so many temporary slots decode parts of it at a time, each of about
    `catch_up_part` bytes of WAL, whose changes the server keeps in temporary files meanwhile.
    `open_transaction_spool`: the server sends large transactions before they commit, and so many
    bytes of them are kept until then; 0: it sends them after.
    """

    kind: Literal["wal"]
    """A logical replication slot and a publication."""
    slot: SlotName
    """The replication slot; `ingestd_<source>` if not set."""
    publication: Identifier
    """The publication; `ingestd_<source>` if not set."""
    manage: bool = True
    """true: slot and publication are made and altered; false: they must exist."""
    snapshot_chunked_above: SizeOrZero = 1_000_000_000
    """A table of this size is read in chunks at its first load too; 0: every keyed one."""
    catch_up_above: SizeOrZero = 64_000_000
    """With more WAL than this to read, a backlog is drained by SQL functions first."""
    catch_up_slots: int = Field(default=2, ge=1, le=16)
    """How many temporary slots decode parts of a backlog at the same time."""
    catch_up_part: SizeBytes = 3_000_000_000
    """About how much WAL such a part has; the server keeps its changes in temporary files."""
    open_transaction_spool: SizeOrZero = 0
    """How much of transactions that are still open may be kept; 0: they are sent after they
    commit."""
    before: Literal["key", "full"] = "key"
    """Old rows that come with updates and deletes: key, or full (needs REPLICA IDENTITY FULL)."""
    ddl_log: Literal["catalog", "event_trigger"] = "catalog"
    """What tells of DDL beside the changes: catalog checks every `discover_interval`, or event
    triggers in the database too, which put it into the WAL at its own place (docs/ddl.md)."""
    slot_lost: Literal["resnapshot", "stop"] = "resnapshot"
    """When the slot is lost: read all tables again, or stop and wait for a person."""

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Name slot and publication after the source."""
        return {"slot": f"ingestd_{source}", "publication": f"ingestd_{source}"}

    def exclusive(self) -> tuple[str, object]:
        """Return the slot: it has one reader."""
        return "slot", (self.slot, self.dsn.get_secret_value())

    @property
    def sent_by(self) -> str:
        """The publication."""
        return self.publication

    @property
    def may_publish(self) -> bool:
        """As `manage` says."""
        return self.manage

    @property
    def logs_ddl(self) -> bool:
        """Whether event triggers tell of DDL."""
        return self.ddl_log == "event_trigger"

    @property
    def keeps_old_rows(self) -> bool:
        """As `before` says."""
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
    """A table's section of a polled source; columns by the source's names, times in seconds.

    `cursor`: the column that grows whenever a row is written, and others that order rows that are
    equal in it; none: every poll looks through the whole table. `key`: what tells rows apart, by
    default the primary key. `detect_deletes`: how often its keys are compared with the lake's; None
    for never. `deleted`: the column that is neither null nor false in a row that counts as deleted.
    `interval`: how often it is polled, instead of as the source says.
    """

    cursor: Annotated[ColumnNames, BeforeValidator(_one_or_more)] | None = None
    """The column that grows whenever a row is written, and others that order rows equal in it;
    none: every poll looks through the whole table."""
    key: ColumnNames | None = None
    """What tells rows apart; the primary key if not set."""
    detect_deletes: SecondsOrOff = None
    """How often the keys are compared with those in the lake."""
    deleted: Identifier | None = None
    """A column that is neither null nor false in a row that counts as deleted."""
    interval: Seconds | None = None
    """How often this table is polled, instead of as the source says."""

    @model_validator(mode="after")
    def _pollable(self) -> PolledTableSettings:
        if self.reference in UNSTREAMED:
            for name in ("cursor", "detect_deletes", "deleted", "interval"):
                if getattr(self, name) is not None:
                    why = (
                        f"its changes are not captured: reference = {self.reference!r}; take it out"
                    )
                    raise KeyPathError((name,), why)
        for number, column in enumerate(self.key or ()):
            at = ("key", number)
            if column in self.exclude_columns:
                why = "is in 'exclude_columns' too; rows can't be told apart without it"
                raise KeyPathError(at, why)
            if self.mask_columns.get(column) == "null":
                why = "is masked with null, and rows can't be told apart without it; use sha256"
                raise KeyPathError(at, why)
            if column == self.deleted:
                raise KeyPathError(at, "is 'deleted' too, which changes when a row is deleted")
        return self


NOT_DESCRIBED = PolledTableSettings()
"""What holds for a polled table without a section of its own."""


class PollingSettings(PostgresSettings):
    """`kind = "polling"`: ordinary queries, on any server and with any role that may read.

    Times are in seconds. `interval`: how often each table is polled while it changes.
    `page_rows`: how many rows a query gives. `statement_timeout`, `lock_timeout`: for each query of
    a poll, 0 for none. `listen`: a channel of NOTIFY that starts a poll at once.
    """

    kind: Literal["polling"]
    """Ordinary queries, on any server and with any role that may read."""
    interval: Seconds = 10.0
    """How often each table is polled while it changes; a quiet one less, down to a tenth as
    often."""
    statement_timeout: SecondsOrZero = 60.0
    """The most that a query of a poll may take; 0 for no limit."""
    lock_timeout: SecondsOrZero = 5.0
    """The most that a query of a poll may wait for a lock; 0 for no limit."""
    page_rows: int = Field(default=10_000, ge=1, le=10_000_000)
    """How many rows a query gives."""
    listen: Identifier | None = None
    """A channel of NOTIFY that starts a poll at once; not on a standby."""
    table: Mapping[str, PolledTableSettings] = {}
    """Settings of single tables: a section each, by `"schema.table"`."""

    def controls(self, table: TableId) -> PolledTableSettings:
        """Return the settings of a table: those of its section, or the defaults."""
        found = (s for text, s in self.table.items() if TableId.parse(text) == table)
        return next(found, NOT_DESCRIBED)


SETTINGS: Mapping[str, type[SourceSettings]] = {"wal": WalSettings, "polling": PollingSettings}
"""A kind's settings model, by `kind`: what `ingestd.config.load_config` is given."""
