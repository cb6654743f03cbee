"""The tables a stream may bring, by OID: what a RELATION message means for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ingestd.changes import Chunk
from ingestd.decode.relation import Relation, table_of
from ingestd.schema import Column, Table, TableId, with_before


class Relations:
    """Resolves RELATION messages to the captured tables as the catalog described them.

    `renamed`: OIDs of tables for which a message had another name. (In a backlog that may be an
    older name than the catalog's; only the catalog can tell.)
    """

    def __init__(self, *, before_full: bool) -> None:
        self._before_full = before_full
        self._tables: dict[int, Table] = {}
        self.renamed: set[int] = set()

    def keep(self, tables: Iterable[Table]) -> None:
        """Resolve to these tables from now on."""
        self._tables = {t.oid: t for t in tables}
        self.renamed.clear()

    @property
    def names(self) -> frozenset[TableId]:
        """The kept tables."""
        return frozenset(t.id for t in self._tables.values())

    def resolve(self, relation: Relation) -> Table | None:
        """Give the table with the message's columns; None if it is not captured."""
        known = self._tables.get(relation.oid)
        if known is None:
            return None
        if known.id != relation.id:
            self.renamed.add(relation.oid)
        told = table_of(relation)
        by_shape = {_shape(c): c for c in known.columns}
        columns = tuple(
            replace(by_shape[_shape(c)], identity=c.identity) if _shape(c) in by_shape else c
            for c in told.columns
        )
        key = tuple(n for n in known.key if any(c.name == n for c in columns))
        table = replace(known, columns=columns, replica_identity=told.replica_identity, key=key)
        return with_before(table, full=self._before_full)

    def described(self, chunk: Chunk, catalog: Iterable[Table]) -> Chunk:
        """Add what only the catalog knows to columns that a RELATION message brought.

        Their type's name, comment and missing value; a column that is gone again has none.
        """
        for table in catalog:
            known = self._tables.get(table.oid)
            if known is not None:
                self._tables[table.oid] = replace(known, columns=table.columns)
        batches = tuple(
            replace(b, table=self._with_catalog(b.table)) if is_bare(b.table) else b
            for b in chunk.batches
        )
        return replace(chunk, batches=batches)

    def _with_catalog(self, table: Table) -> Table:
        by_shape = {_shape(c): c for c in self._tables[table.oid].columns}
        columns = tuple(
            replace(by_shape.get(_shape(c), c), identity=c.identity) for c in table.columns
        )
        return replace(table, columns=columns)


def is_bare(table: Table) -> bool:
    """Whether it has columns that only a RELATION message told of."""
    return any(not c.pg_type for c in table.columns)


def _shape(column: Column) -> tuple[str, int, int]:
    return column.name, column.type_oid, column.typmod
