"""The slot and the publication that a source has on its server, and dropping them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.model.errors import OperatorError, TransientError
from ingestd.postgres.catalog.publication import find_publication, lists_schemas, published
from ingestd.postgres.connection.control_connection import ControlConnection
from ingestd.postgres.connection.dsn import role_of
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.slots.slot import busy_slot, drop_slot, find_slot


@dataclass(frozen=True, slots=True)
class SourceObject:
    """An object on the server. `kind`: slot or publication; `detail`: its size or state.

    `why_kept`: why it is not dropped, None if it is; `statement`: the SQL that drops it.
    """

    kind: str
    name: str
    detail: str
    why_kept: str | None
    statement: str

    @property
    def is_dropped(self) -> bool:
        """True if the command drops it."""
        return self.why_kept is None


class SourceObjects:
    """The objects of a source of kind `wal` on its server. Use within `claimed_objects`."""

    def __init__(
        self, control: ControlConnection, connection: AsyncConnection[Any], settings: WalSettings
    ) -> None:
        self._control = control
        self._connection = connection
        self._settings = settings

    @property
    def server(self) -> str:
        """Its name: role, host, port and database."""
        info = self._connection.info
        role = role_of(self._settings.dsn.get_secret_value()) or info.user
        return f"{role}@{info.host}:{info.port}/{info.dbname}"

    async def find(self) -> list[SourceObject]:
        """Return the existing objects. Raises OperatorError while a client reads the slot."""
        with self._control.errors("drop"):
            found = [await self._slot(), await self._publication()]
        return [each for each in found if each is not None]

    async def drop(self, dropped: SourceObject) -> None:
        """Drop it, if it still exists."""
        with self._control.errors("drop"):
            if dropped.kind == "slot":
                await drop_slot(self._connection, dropped.name)
            else:
                statement = sql.SQL("DROP PUBLICATION IF EXISTS {}")
                await self._connection.execute(statement.format(sql.Identifier(dropped.name)))

    async def _slot(self) -> SourceObject | None:
        name = self._settings.slot
        slot = await find_slot(self._connection, name)
        if slot is None:
            return None
        kept = None if self._settings.manage else "manage = false"
        if slot.is_other(self._connection.info.dbname):
            kept = "it is not a slot of ingestd"
        elif slot.active_pid is not None and kept is None:
            busy = busy_slot(name, slot)
            raise OperatorError(busy.what, remedy=busy.remedy)
        drop = sql.SQL("SELECT pg_catalog.pg_drop_replication_slot({});").format(name)
        held = "invalid" if slot.is_lost else f"it holds back {slot.retained_bytes or 0:,} bytes"
        return SourceObject("slot", name, held, kept, printed(drop))

    async def _publication(self) -> SourceObject | None:
        name, connection = self._settings.publication, self._connection
        found = await find_publication(connection, name)
        if found is None:
            return None
        kept = None if self._settings.manage else "manage = false"
        if found.all_tables or await lists_schemas(connection, name):
            kept = "ingestd creates no publication for all tables or for schemas"
        elif found.on_standby:
            kept = "a standby can't drop it; drop it on the primary"
        elif not found.owned:
            kept = "it belongs to another role"
        sent = await published(connection, name, connection.info.server_version)
        drop = sql.SQL("DROP PUBLICATION {};").format(sql.Identifier(name))
        detail = f"{len(sent)} tables"
        return SourceObject("publication", name, detail, kept, printed(drop))


@asynccontextmanager
async def claimed_objects(source: str, settings: WalSettings) -> AsyncIterator[SourceObjects]:
    """Claim the source, so that no daemon works on it meanwhile (I5).

    Raises OperatorError while a daemon does, and the errors of `classify`.
    """
    where = f"source {source}"
    control = ControlConnection(where, settings.dsn.get_secret_value())
    try:
        try:
            await control.claim(
                settings.slot,
                taken=f"a daemon works on slot {settings.slot!r}",
                remedy="stop it first (or remove the source from its config)",
            )
        except TransientError as error:
            if error.reason != "claimed":
                raise
            raise OperatorError(error.what, remedy=error.remedy) from error
        yield SourceObjects(control, await control.connection(), settings)
        await control.release()
    finally:
        await control.close()
