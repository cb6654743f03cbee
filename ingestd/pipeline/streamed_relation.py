"""What the stream sent of a table's columns, compared with what `_tables` has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingestd.model.lake_state import RegisteredTable, registered_columns
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table
from ingestd.ports import Discovery


@dataclass(slots=True)
class StreamedRelation:
    """What the stream sent of a table.

    `last_change`: commit position of the last transaction that changed it. `relation_xact`: commit
    position of the last transaction that sent its columns, and its xid where that is known.
    `version`: the newest columns; `compared`: the row of `_tables` that they agree with.
    `incomplete`: the last transaction with a row that lacked values (`row_checks`) while the
    table was not live.
    """

    last_change: Lsn | None = None
    relation_xact: tuple[Lsn, int | None] | None = None
    version: Table | None = None
    compared: RegisteredTable | None = None
    incomplete: Lsn | None = None

    def is_newer_than(self, discovery: Discovery) -> bool:
        """Return whether columns came from a transaction that the discovery does not see.

        A transaction may be invisible though its commit precedes the discovery's position: its
        record is in the WAL before others see it, and for as long as a synchronous standby does
        not answer.
        """
        if self.relation_xact is None:
            return False
        lsn, xid = self.relation_xact
        if lsn >= discovery.lsn or discovery.seen is None or xid is None:
            return lsn >= discovery.lsn
        return not discovery.seen.sees(np.array([xid]))[0]

    def is_new_version(self, table: Table, known: RegisteredTable | None) -> bool:
        """Record what the stream sent; return whether `_tables` has other columns (`known`)."""
        if self.version is table and self.compared is known:
            return False
        self.version = table
        if differs(table, known):
            return True
        self.compared = known
        return False

    def is_ambiguous(self, table: Table, known: RegisteredTable, first: Lsn) -> bool:
        """Return whether rows of one transaction, separated by DDL in it, could be confused.

        `first`: the commit position of the first row with the new columns. A column with a default
        was added after other rows of its transaction: they have it in the source, but `_tables`
        covers only the rows of earlier transactions. Or a column returned: what was written in
        between lies under another name or type. Or names are in another order, and only different
        columns can be.
        """
        before = {c.name for c in known.columns}
        new = [c for c in table.columns if c.lake_name not in before]
        returns = any(c.lake_name in known.lake_columns for c in new)
        is_defaulted = self.last_change == first and any(c.missing is not None for c in new)
        return returns or is_defaulted or _in_another_order(table, known)


def differs(table: Table, known: RegisteredTable | None) -> bool:
    """Return whether `_tables` has other columns, or another replica identity, of a table."""
    if known is None or known.columns != registered_columns(table):
        return True
    return known.replica_identity != table.replica_identity


def _in_another_order(table: Table, known: RegisteredTable) -> bool:
    """Return whether common columns are in another order: in the source no column moves."""
    now, then = [c.name for c in table.columns], [c.source_name for c in known.columns]
    both = {*now} & {*then}
    return [name for name in now if name in both] != [name for name in then if name in both]
