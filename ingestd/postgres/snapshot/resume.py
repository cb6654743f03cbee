"""The part of a table that is still unread: blocks, by file. Recorded in `_tables`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ingestd.model.errors import TableReplacedError
from ingestd.model.lsn import Lsn
from ingestd.model.recorded import Recorded, RecordError, integer_of, read_json
from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf
from ingestd.postgres.snapshot.ctid_splits import split_blocks

Blocks = tuple[int, int | None]
"""First block, and the one after the last; None: up to the end."""
MOST_TEXT_BYTES = 16 << 20
"""The maximum size of the text, many times that of 50,000 partitions."""
_MOST_VALUES = 500_000
_MOST_BLOCKS = 1 << 32
"""InvalidBlockNumber is the last one (src/include/storage/block.h)."""
_MOST_OID = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class SnapshotRemainder:
    """What a snapshot at `point` left unread: the file and blocks, by OID of the relation.

    `key`: names of the columns that identified its rows. `nbytes`: size of the entire table by the
    source's estimate, for the progress.
    """

    point: Lsn
    key: tuple[str, ...]
    nbytes: int
    left: dict[int, tuple[int, tuple[Blocks, ...]]]

    def __str__(self) -> str:
        """Return the text for `_tables`."""
        return json.dumps(
            {
                "point": str(self.point),
                "key": self.key,
                "bytes": self.nbytes,
                "left": self.left,
            },
            separators=(",", ":"),
        )

    @classmethod
    def parse(cls, text: str) -> SnapshotRemainder:
        """Return the remainder in a text of `str`. Raises RecordError."""
        found = read_json(text, MOST_TEXT_BYTES, _MOST_VALUES)
        left = {}
        for oid, parts in found.field("left").fields().items():
            file, blocks = parts.items(2)
            left[integer_of(oid, 1, _MOST_OID)] = file.integer(1, _MOST_OID), _ranges(blocks)
        key = tuple(name.text() for name in found.field("key").items())
        nbytes = found.field("bytes").integer()
        return cls(found.field("point").position(), key, nbytes, left)

    def splits(self, table: Table, leaves: Sequence[Leaf], target_bytes: int) -> list[Split]:
        """Split the remainder. Raises TableReplacedError if the relations have changed."""
        present = {leaf.oid: leaf for leaf in leaves if not leaf.is_whole}
        if any(o not in present or present[o].file != f for o, (f, _) in self.left.items()):
            raise TableReplacedError(table.id, "was rewritten, truncated or divided otherwise")
        return [
            Split(table, "", blocks.to_text(), nbytes)
            for oid, (_, ranges) in self.left.items()
            for first, end in ranges
            for blocks, nbytes in split_blocks(present[oid], first, end, target_bytes)
        ]


def remainder_text(
    table: Table, point: Lsn, nbytes: int, splits: Iterable[str], done: Collection[str]
) -> str:
    """Return the text for the unread splits (`Split.where`); empty if they are not all blocks."""
    found: dict[int, tuple[int, list[Blocks]]] = {}
    for where in splits:
        if where in done:
            continue
        blocks = BlockRange.parse(where)
        if blocks.is_whole or not blocks.file:
            return ""
        ranges = found.setdefault(blocks.oid, (blocks.file, []))[1]
        if ranges and ranges[-1][1] == blocks.start:
            ranges[-1] = (ranges[-1][0], blocks.end)
        else:
            ranges.append((blocks.start, blocks.end))
    left = {oid: (file, tuple(ranges)) for oid, (file, ranges) in found.items()}
    return str(SnapshotRemainder(point, table.identifying, nbytes, left))


def _ranges(recorded: Recorded) -> tuple[Blocks, ...]:
    """Return ranges that ascend and do not overlap; only the last may be open, an only one empty.

    So there are not more of them than blocks, however often they are split.
    """
    found: list[Blocks] = []
    every = recorded.items()
    least: int | None = 0
    for blocks in every:
        first, end = blocks.items(2)
        if least is None:
            raise RecordError("a range follows an open one")
        start = first.integer(least, _MOST_BLOCKS)
        least = None if end.is_null else end.integer(start + (len(every) > 1), _MOST_BLOCKS)
        found.append((start, least))
    return tuple(found)
