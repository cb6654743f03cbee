"""What two catalog readings prove about a table's rows.

The stream contains inserts, updates, deletes and the TRUNCATE of a published table. Any other
change of rows, or of the meaning of their texts, must be found in the catalog. The rule:

    Rows are unchanged only if two readings prove that nothing happened between them which the
    stream does not contain. If they can't prove it, the table is re-read.

The evidence and what it shows:

- `relfilenode` is the same: the file was not replaced, so there was no TRUNCATE and no rewrite.
- It differs, and a visible row is older than the first reading: the rows were kept (VACUUM FULL,
  CLUSTER, SET TABLESPACE). After TRUNCATE or a rewrite of the rows no such row remains.
- It differs, and no row is older: TRUNCATE, a rewrite, pg_repack, or all rows were written since.
- The OID of the TOAST table is the same: no ALTER TABLE rewrote the rows. VACUUM FULL and TRUNCATE
  keep it. A different OID does not show whether ALTER TABLE or pg_repack replaced it.
- `xmin` of a row of pg_attribute, pg_inherits, pg_enum, pg_depend or pg_publication is the same:
  it was not altered. A different xmin does not show its state in between.
- The OID of a constraint or of a publication's entry is the same: it was not dropped. So a primary
  key that was replaced is found by the OID of its constraint (`KeyMark`), even if it has the same
  columns.

A row is older than a reading if its xmin is below the id under which all transactions had ended at
that reading: any transaction that has written to a new file since has a higher id. Ids are ordered
neither by time nor by commit, so they never decide which of two events came first.

One event leaves no trace in the catalog: TRUNCATE of a partition by the transaction that created it
keeps the file, and the stream does not contain it. So a table with a new partition is re-read,
unless the stream shows that a different transaction was the first to write to the partition: one
with a higher id than the creator's, because a subtransaction's id is higher than the ids of its
parent transactions.

This module runs no queries. `judge` yields the questions that only the rows can answer, each with
its meaning if the answer is no. `ingestd.postgres.rewrites.fingerprint_queries` runs them.

Source: PostgreSQL, src/backend/commands/tablecmds.c (ATRewriteTables, ExecuteTruncateGuts),
cluster.c (swap_relation_files); documentation, "ALTER TABLE", "Notes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ingestd.postgres.rewrites.fingerprint import COMPARABLE_XIDS, TableFingerprint

REWRITTEN = "rewritten by ALTER TABLE"
UNLOGGED = f"{REWRITTEN}, or temporarily unlogged"
_TEXTS = {25, 1043}
"""text and varchar."""


class Question(Enum):
    """Questions that the rows of a table or partition can answer."""

    HAS_OLDER_ROW = auto()
    """Does a row exist that is older than the first reading?"""
    CAME_EMPTY = auto()
    """Was it made by CREATE TABLE ... PARTITION OF, or was no block ever written to it?"""
    NEVER_A_PARTITION = auto()
    """Does no partitioned table have the columns of this one?"""


@dataclass(frozen=True, slots=True)
class Doubt:
    """`reason`: why the rows are re-read, unless the answer to the `question` is yes.

    `oid`: the table or partition to query. `ended`: see `TableFingerprint`. `known`: the partitions
    that existed at the first reading, including partitioned ones.
    """

    reason: str
    oid: int
    question: Question
    ended: int = 0
    known: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Proven:
    """`reason`: an event that requires the rows to be re-read in any case."""

    reason: str


def judge(oid: int, then: TableFingerprint, now: TableFingerprint) -> Iterator[Proven | Doubt]:
    """Yield evidence against the rows of a table, given two catalog readings.

    Nothing is yielded if the rows are those of the stream. Evidence that needs no query comes
    first.
    """
    if then.is_doubted:
        yield Proven("the daemon ended before evidence from the stream was judged")
    for reason in (
        _filtered(then, now),
        _reassigned(then, now),
        _rekeyed(then, now),
        _moved(then, now),
        _parted(oid, then, now),
    ):
        if reason is not None:
            yield Proven(reason)
    if now.is_streamed and _all_touched(then, now):
        reason = "its columns were altered as ATTACH and DETACH of a partition do"
        yield Doubt(reason, oid, Question.NEVER_A_PARTITION)
    for leaf in now.files.keys() - then.files.keys() - {oid}:
        yield Doubt(
            "a partition was added with rows",
            leaf,
            Question.CAME_EMPTY,
            known=frozenset(then.attach_xids),
        )
    for file in then.files.keys() & now.files.keys():
        if then.files[file] != now.files[file]:
            yield from _of_replaced_file(oid, file, then, now)


def _of_replaced_file(
    oid: int, file: int, then: TableFingerprint, now: TableFingerprint
) -> Iterator[Proven | Doubt]:
    """Yield the meaning of a replaced file if no row in it is older."""
    reason = _meaning(oid, file, then, now)
    if reason is None:
        return
    added = {c.number for c in now.columns} - {c.number for c in then.columns}
    if added:
        # VACUUM FULL writes a constant default into the rows before any reading has recorded it.
        yield Proven(reason)
    elif then.ended and now.ended - then.ended < COMPARABLE_XIDS:
        yield Doubt(reason, file, Question.HAS_OLDER_ROW, then.ended)
    else:
        yield Proven(reason)  # no row's age can be compared with the first reading


def _meaning(oid: int, file: int, then: TableFingerprint, now: TableFingerprint) -> str | None:
    if is_altered(then, now) or _has_forgotten(then, now):
        return REWRITTEN
    # 0: there is no TOAST table; None: unknown.
    had_toast = then.toast.get(file)
    is_same_toast = bool(had_toast) and had_toast == now.toast.get(file)
    if file != oid:
        is_rewrite = bool(had_toast) and not is_same_toast
        return f"a partition was {UNLOGGED if is_rewrite else 'truncated directly'}"
    if not now.is_streamed:
        return "truncated"
    # The stream contains its TRUNCATE.
    return None if now.is_listed or is_same_toast else UNLOGGED


def _filtered(then: TableFingerprint, now: TableFingerprint) -> str | None:
    return None if then.row_filter == now.row_filter else "the publication's row filter changed"


def _moved(then: TableFingerprint, now: TableFingerprint) -> str | None:
    """Return a reason if it may have been in an unpublished schema between the readings."""
    is_moved = bool(then.schema_xid and now.schema_xid) and then.schema_xid != now.schema_xid
    return "it was temporarily in another schema" if is_moved and not now.is_listed else None


def _parted(oid: int, then: TableFingerprint, now: TableFingerprint) -> str | None:
    if then.files.keys() - now.files.keys() - {oid}:
        return "a partition was detached or dropped"
    if any(then.attach_xids.get(leaf, xids) != xids for leaf, xids in now.attach_xids.items()):
        return "a partition was detached and attached again"
    return None


def _rekeyed(then: TableFingerprint, now: TableFingerprint) -> str | None:
    """Return why changes may identify their rows by a different key than those before.

    A key that was dropped and added again was not enforced in between. A different type of a key
    column may have different texts for equal values.
    """
    if then.key is None or now.key is None or not now.is_streamed:
        return None
    if then.key != now.key:
        return "its key or replica identity changed"
    before = {c.number: (c.type_oid, c.typmod) for c in then.columns}
    keyed = {*now.key.key, *now.key.identity}
    if now.key.replica_identity == "f" and not now.key.key:
        keyed = set()
    for column in now.columns:
        is_other = before.get(column.number) != (column.type_oid, column.typmod)
        if column.number in keyed and is_other:
            return "the type of a key column changed"
    return None


def _all_touched(then: TableFingerprint, now: TableFingerprint) -> bool:
    """Return whether every column was altered, as ATTACH PARTITION and DETACH do."""
    before = {c.number: c.xmin for c in then.columns}
    return bool(now.columns) and all(
        c.number in before and before[c.number] != c.xmin for c in now.columns
    )


def is_altered(then: TableFingerprint, now: TableFingerprint) -> bool:
    """Return whether a column was added, or altered in a way that causes a rewrite.

    VACUUM FULL alters pg_attribute, too: it writes constant defaults into the rows and removes them
    from there.
    """
    before = {c.number: c for c in then.columns}
    for column in now.columns:
        old = before.get(column.number)
        if old is None or (old.type_oid, old.typmod) != (column.type_oid, column.typmod):
            return True
        # ALTER TYPE replaces the default's row, VACUUM FULL does not.
        is_vacuumed = old.has_missing and not column.has_missing
        is_vacuumed &= old.default_oid == column.default_oid
        if old.xmin != column.xmin and not is_vacuumed:
            return True
    return False


def _has_forgotten(then: TableFingerprint, now: TableFingerprint) -> bool:
    """Return whether constant defaults were written into the rows, as every rewrite does."""
    present = {c.number for c in now.columns if not c.has_missing}
    return any(c.has_missing and c.number in present for c in then.columns)


def _reassigned(then: TableFingerprint, now: TableFingerprint) -> str | None:
    """Return the result of `reassigned`, or that a rewrite caused it."""
    reason = reassigned(then, now)
    common = then.files.keys() & now.files.keys()
    is_rewrite = any(then.files[f] != now.files[f] for f in common) and is_altered(then, now)
    return REWRITTEN if reason is not None and is_rewrite else reason


def reassigned(then: TableFingerprint, now: TableFingerprint) -> str | None:
    """Return why a name or a type has a different meaning for older rows; None if none has."""
    before = {c.number: c for c in then.columns}
    once = then.former | {c.name for c in then.columns}
    for column in now.columns:
        old = before.get(column.number)
        if old is None:
            # The name of a column that was added and dropped between the readings is unknown.
            unseen = range(then.numbered + 1, column.number) if then.numbered else ()
            if column.name in once or not now.dropped.isdisjoint(unseen):
                return "a column was dropped and re-created"
        elif old.name != column.name:
            return "a column was renamed"
        elif not reads_alike(old.type_oid, column.type_oid):
            return "a column's type changed"
    types = {t.oid: t for t in then.types}
    if any(t.oid in types and t.has_changed_since(types[t.oid]) for t in now.types):
        return "labels or attributes of a type changed"
    return None


def reads_alike(then: int, now: int) -> bool:
    """Return whether equal bytes have equal texts; timestamp and timestamptz differ."""
    return then == now or {then, now} <= _TEXTS
