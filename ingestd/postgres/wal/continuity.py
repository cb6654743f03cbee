"""Decides whether the slot still has every change after the lake's position.

The comparisons, in this order, and their results:

    the server's WAL ends before what the lake has    Lost, and refused until it has passed that:
                                                      LSNs would say nothing
    nothing at all in the lake, and a slot that was   LakeLost
    read
    rows of another server, and a slot here that was  LakeLost: another source's lake
    read
    a slot that was read beyond the lake              LakeLost: an older copy, or a slot that
                                                      another client moved or re-created
    nothing in the lake needs continuity              Fresh
    another system identifier                         Lost: another server
    another timeline whose history lacks some of the  Lost
    lake, or that did not keep the slot
    the lake was written by polling                   Lost
    no publication or one created after changes that  Lost
    the slot has yet to send
    a row that the server can't output                Lost
    no slot, or an invalid one                        Lost
    a slot beyond the lake that was never read        Lost
    else                                              Resumed

The lake records the source before ingestd creates a slot. So a slot that ingestd manages counts as
read if it exists. For a slot that it does not manage (manage = false) the server's statistics
decide, if they say anything.

The lake that a slot was read into is never behind the slot (I1). So any lake that is not behind has
everything that the slot no longer has: the lake's id need not be known.

A table is re-read at a point above everything that the lake has of it, so a server that is behind
must pass that first. It may do so before the next comparison: the loss must be recorded.

Source: PostgreSQL documentation, "Timelines", "Replication Slot Synchronization".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import ZERO, Lsn
from ingestd.ports import Continuity, Fresh, LakeLost, Lost, Resumed, ServerEnd
from ingestd.postgres.catalog.publication import find_publication
from ingestd.postgres.connection.wal_position import current_position
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.server import (
    FIRST_DECODING_STANDBY,
    WalServer,
    switch_points,
)
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap
from ingestd.postgres.wal.slots.slot import (
    FIRST_WITH_FAILOVER,
    Slot,
    find_slot,
    gap_before,
)

POLLED_AHEAD_BYTES = 1 << 16
WAL_SEGMENT_BYTES = 16 << 20
"""The default of initdb; used only in the text of a remedy."""


@dataclass(frozen=True, slots=True)
class SlotContinuity:
    """The state of the server and its slot.

    `current`: where its WAL ends. `switched`: the timelines that its own descends from, and where
    each was left (empty where that was not queried).
    """

    server: WalServer
    current: Lsn
    slot: Slot | None
    has_publication: bool
    switched: Mapping[int, Lsn]
    decode_gap: SlotDecodeGap = field(default_factory=SlotDecodeGap)


async def continuity_of(
    control: AsyncConnection[Any],
    server: WalServer,
    settings: WalSettings,
    committed: LakeState,
    *,
    decode_gap: SlotDecodeGap,
    where: str,
) -> Continuity:
    """Compare slot and server with what the lake holds. Changes nothing.

    `decode_gap`: what the slot was found to lack. `where` begins an error's text. Raises
    psycopg.Error; TransientError while a standby is behind the lake; OperatorError for another
    server that is behind a lake without rows that count, and for a slot that ingestd can't use.
    """
    slot = await find_slot(control, settings.slot)
    publication = await find_publication(control, settings.publication)
    current = await current_position(control)
    switched: Mapping[int, Lsn] = {}
    if committed.server_id not in {None, server.server_id}:
        switched = await switch_points(settings.dsn.get_secret_value(), server.timeline)
    found = SlotContinuity(server, current, slot, publication is not None, switched, decode_gap)
    return judge(found, settings, committed, where=where)


async def server_end(
    control: AsyncConnection[Any], server: WalServer, settings: WalSettings, committed: LakeState
) -> ServerEnd:
    """Return the end of what this server can have sent to this lake. Raises psycopg.Error."""
    current = await current_position(control)
    system, _, timeline = (committed.server_id or server.server_id).partition("/")
    if "/" in timeline:
        return ServerEnd(Lsn(current + POLLED_AHEAD_BYTES), server.in_recovery)
    if system == server.system_identifier and timeline != str(server.timeline):
        slot = await find_slot(control, settings.slot)
        switched = await switch_points(settings.dsn.get_secret_value(), server.timeline)
        left = switched.get(int(timeline)) if timeline.isdigit() else None
        if left is not None and (slot is None or (slot.confirmed_lsn or ZERO) <= left):
            return ServerEnd(min(left, current), server.in_recovery)
    return ServerEnd(current, server.in_recovery)


def judge(
    present: SlotContinuity, settings: WalSettings, committed: LakeState, *, where: str
) -> Continuity:
    """Return the result; see the module for the order, and `continuity_of` for the errors."""
    server, slot, position = present.server, present.slot, committed.position
    reached = max(position or ZERO, committed.floor or ZERO)
    if present.current < reached:
        return _behind(present, settings.slot, reached, committed, where)
    fault = None if slot is None else slot.fault(settings.slot, server.database)
    if fault is not None:
        raise OperatorError(f"{where}: {fault.what}", remedy=fault.remedy)
    lost = _not_the_lake(present, settings, committed)
    if lost is not None:
        return LakeLost(lost)
    if position is None or not committed.needs_continuity:
        return Fresh()
    gap = _gap(present, settings, committed, position)
    return Resumed() if gap is None else Lost(gap)


def _not_the_lake(
    present: SlotContinuity, settings: WalSettings, committed: LakeState
) -> str | None:
    """Return why this is not the lake that the slot was read into; None if it may be."""
    slot, position = present.slot, committed.position
    if slot is None or not (settings.manage or slot.read_transactions > 0):
        return None
    read = f"slot {settings.slot!r} was read to {slot.confirmed}"
    if committed.has_nothing:
        return (
            f"{read}, and the lake has nothing of this source: its folder was removed or is not "
            "mounted, or lake.uri names another lake"
        )
    if position is None or not committed.needs_continuity or slot.is_lost:
        return None
    other = _other_server(committed.server_id or present.server.server_id, present.server)
    if other is not None:
        return f"{other}; and {read} here: it is another source's lake"
    if (slot.confirmed_lsn or ZERO) > position:
        return (
            f"{read}, and the lake ends at {position}: it is an older copy of the lake, or another"
            " client moved or re-created the slot"
        )
    return None


def _gap(
    present: SlotContinuity, settings: WalSettings, committed: LakeState, position: Lsn
) -> str | None:
    """Return why the server may lack changes that follow the lake; None if it has them all."""
    server = present.server
    server_id = committed.server_id or server.server_id
    other = _other_server(server_id, server)
    if other is not None:
        return other
    if "/" in server_id.partition("/")[2]:
        return "the lake's rows came by another kind of capture, which did not move the slot"
    timeline = server_id.partition("/")[2]
    if timeline != str(server.timeline):
        reached = max(position, committed.floor or ZERO)
        parted = _parted(present, settings.slot, timeline, reached)
        if parted is not None:
            return parted
    if not present.has_publication:
        # Re-created, it is unknown to the WAL that the slot has yet to decode.
        return f"publication {settings.publication!r} does not exist"
    lacked = present.decode_gap.why(settings.publication)
    return lacked or gap_before(present.slot, settings.slot, position)


def _other_server(server_id: str, server: WalServer) -> str | None:
    """Return why the lake's rows are not from this server; None if they are."""
    system = server_id.partition("/")[0]
    if system != server.system_identifier:
        return (
            f"this server (system identifier {server.system_identifier}) is not the one that the "
            f"lake's rows came from ({system})"
        )
    return None


def _parted(present: SlotContinuity, name: str, timeline: str, reached: Lsn) -> str | None:
    """Return why a server on another timeline does not continue the lake; None if it may."""
    server, slot = present.server, present.slot
    promoted = f"the server was promoted or restored (timeline {timeline}, now {server.timeline})"
    switched = present.switched.get(int(timeline)) if timeline.isdigit() else None
    if switched is None:
        return f"{promoted}: its history does not have the lake's timeline"
    if server.version < FIRST_DECODING_STANDBY:
        return f"{promoted}: PostgreSQL {server.version_text} does not keep slots through that"
    if slot is None:
        hint = ""
        if server.version >= FIRST_WITH_FAILOVER:
            hint = " (a standby with sync_replication_slots = on keeps a copy)"
        return f"{promoted}: it has no slot {name!r}{hint}"
    # A slot that was confirmed beyond the switch has already been read on this timeline.
    if reached > switched and (slot.confirmed_lsn or ZERO) <= switched:
        return (
            f"{promoted} at {switched}, the lake ends at {reached}: it has changes that this "
            "server never received (synchronized_standby_slots on the primary prevents that)"
        )
    return None


def _behind(
    present: SlotContinuity, slot: str, reached: Lsn, committed: LakeState, where: str
) -> Lost:
    is_polled = (committed.server_id or "").count("/") > 1
    if is_polled and reached - present.current < POLLED_AHEAD_BYTES:
        raise TransientError(
            f"{where}: the lake was written by polling, whose positions run ahead of a server that "
            "writes nothing",
            reason="server_idle",
            remedy="wait for it, or SELECT pg_logical_emit_message(true, '', '');",
        )
    what = f"the lake ends at {reached}, the server is at {present.current}"
    if present.server.in_recovery:
        raise TransientError(
            f"{where}: {what}: the standby has not replayed all that the lake has",
            reason="standby_behind",
            remedy="wait, or find out what delays its replay",
        )
    what += ": it was restored from an older backup, or it is another server"
    segments = reached // WAL_SEGMENT_BYTES - present.current // WAL_SEGMENT_BYTES + 1
    advance = "SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()"
    remedy = (
        "give this server its own lake.uri or source name. Or, to re-read all tables into this "
        f"lake: drop slot {slot!r} if it exists, and then "
        f"{advance} FROM generate_series(1, {segments});"
    )
    if not committed.needs_continuity:
        raise OperatorError(f"{where}: {what}", remedy=remedy)
    return Lost(what, remedy=remedy, is_behind=True)
