"""Settings of the kinds of capture: what a `[sources.NAME]` section may say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import Field, SecretStr, field_validator

from ingestd.config import SourceSettings
from ingestd.quantities import Seconds, SizeBytes, SizeOrZero

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_IDENTIFIER_BYTES = 63
"""NAMEDATALEN - 1 of a standard server."""

SlotName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")]
"""Source: PostgreSQL, ReplicationSlotValidateName."""


class WalSettings(SourceSettings):
    """`kind = "wal"`: a logical replication slot and a publication (design section 4).

    `discover_interval`: how often, in seconds, the catalog is asked for tables that are new or
    others than before. `snapshot_chunked_above`: a table of so many bytes is read in chunks at its
    first load too; `snapshot_chunk`: about how much of it at a time.
    """

    kind: Literal["wal"]
    slot: SlotName
    publication: str
    manage: bool = True
    snapshot: Literal["initial", "never"] = "initial"
    snapshot_workers: int = Field(default=2, ge=1, le=64)
    snapshot_chunked_above: SizeOrZero = 1_000_000_000
    snapshot_chunk: SizeBytes = 32_000_000
    before: Literal["key", "full"] = "key"
    slot_lost: Literal["resnapshot", "stop"] = "resnapshot"
    on_rewrite: Literal["resnapshot", "record"] = "resnapshot"
    discover_interval: Seconds = 15.0

    @classmethod
    def defaults(cls, source: str) -> Mapping[str, object]:
        """Name slot and publication after the source."""
        return {"slot": f"ingestd_{source}", "publication": f"ingestd_{source}"}

    def exclusive(self) -> tuple[str, object]:
        """Give the slot: it has one reader."""
        return "slot", (self.slot, self.dsn.get_secret_value())

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

    @field_validator("publication")
    @classmethod
    def _publication_name(cls, name: str) -> str:
        if not 1 <= len(name.encode()) <= _MAX_IDENTIFIER_BYTES:
            msg = f"must be 1-{_MAX_IDENTIFIER_BYTES} bytes long"
            raise ValueError(msg)
        return name


SETTINGS: Mapping[str, type[SourceSettings]] = {"wal": WalSettings}
"""A kind's settings model, by `kind`: what `ingestd.config.load_config` is given."""
