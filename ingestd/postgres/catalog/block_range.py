"""A range of a table's blocks, which is what a Postgres split reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from psycopg import sql

from ingestd.model.recorded import read_json


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks `start` to `end` (exclusive; None: to the table's end) of one table or partition.

    `oid`, `file`: of that relation, with its pg_relation_filenode at the time of the split; 0 if
    unknown. `is_whole`: the relation can't be read by blocks; read all of it (and its partitions).
    `is_packed`: small values only, so the server can pack them by column.
    """

    schema: str
    name: str
    start: int = 0
    end: int | None = None
    is_whole: bool = False
    is_packed: bool = False
    oid: int = 0
    file: int = 0

    def to_text(self) -> str:
        """Serialize it for `Split.where`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> BlockRange:
        """Parse `Split.where`, which a backfill's plan records in the lake. Raises RecordError."""
        found = read_json(text)
        end = found.field("end")
        return cls(
            found.field("schema").text(),
            found.field("name").text(),
            found.field("start").integer(),
            None if end.is_null else end.integer(),
            is_whole=found.field("is_whole").flag(),
            is_packed=found.field("is_packed").flag(),
            oid=found.field("oid").integer(),
            file=found.field("file").integer(),
        )

    @property
    def is_all(self) -> bool:
        """Return whether it covers the complete relation."""
        return self.start == 0 and self.end is None

    @property
    def relation(self) -> sql.Composable:
        """The operand of FROM."""
        name = sql.Identifier(self.schema, self.name)
        return name if self.is_whole else sql.SQL("ONLY ") + name

    @property
    def bounds(self) -> list[sql.Composable]:
        """The conditions on ctid, to be joined with AND; empty for all blocks."""
        bounds: list[sql.Composable] = []
        if self.start > 0:
            bounds.append(sql.SQL("ctid >= {}::pg_catalog.tid").format(f"({self.start},0)"))
        if self.end is not None:
            bounds.append(sql.SQL("ctid < {}::pg_catalog.tid").format(f"({self.end},0)"))
        return bounds
