"""Whether the slot still has every change after the lake's position."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.published import find_publication
from ingestd.capture.wal.server import Server
from ingestd.capture.wal.slot import find_slot, gap_before
from ingestd.errors import OperatorError
from ingestd.ports import Continuity, Fresh, Lost, Resumed
from ingestd.positions import ZERO, Lsn
from ingestd.recorded import Committed


async def continuity_of(
    control: AsyncConnection[Any],
    server: Server,
    settings: WalSettings,
    committed: Committed,
    *,
    where: str,
) -> Continuity:
    """Compare slot and server with what the lake holds. Changes nothing.

    `where` begins an error's text. Raises psycopg.Error; OperatorError for a lake whose LSNs can't
    be compared with this server's.
    """
    slot = await find_slot(control, settings.slot)
    publication = await find_publication(control, settings.publication)
    cursor = await control.execute("SELECT pg_current_wal_lsn()::text")
    row = await cursor.fetchone()
    assert row is not None
    current = Lsn.parse(row[0])
    system, _, timeline = (committed.origin or server.origin).partition("/")
    if system != server.system_identifier:
        raise _foreign_lake(where, f"came from server {system}, this is another")
    reached = max(committed.position or ZERO, committed.floor or ZERO)
    if current < reached:
        raise _foreign_lake(where, f"ends at {reached}, the server is at {current}")
    if not committed.needs_continuity or committed.position is None:
        return Fresh()
    if timeline != str(server.timeline):
        return Lost(f"the server was promoted: timeline {timeline}, now {server.timeline}")
    if publication is None:
        # Made anew it is unknown to the WAL that the slot still has to decode.
        return Lost(f"publication {settings.publication!r} does not exist any more")
    gap = gap_before(slot, settings.slot, committed.position)
    return Resumed() if gap is None else Lost(gap)


def _foreign_lake(where: str, what: str) -> OperatorError:
    return OperatorError(
        f"{where}: the lake {what} (restored, replaced or promoted server)",
        remedy="give this server a lake.uri or a source name of its own",
    )
