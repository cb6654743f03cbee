"""Texts that changes came with and that no object has any more.

An object may be renamed and renamed back, or created, referred to and dropped, between two readings
of the catalog, which then show nothing. The changes show it: their text is one that the next
reading does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.model.changes import TableBatch
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.postgres.rewrites.dependent_texts import MONEY, TableTexts, TypeUse

_MOST = 1000
"""So many texts of a table are kept at most: one that is still unknown is enough."""
_REASON = "an object that its values refer to had another name for a time"


@dataclass(slots=True)
class StreamedTexts:
    """Texts since the last reading of the catalog that it did not have. On the event loop only.

    `_last`: that reading, by table; `_known`: the texts of its objects, by type. `_new`: by the
    table's OID, which transactions brought a text of a type. `_voided` and `_points`: which rows
    are void, as the table is, or has been, read again.
    """

    _last: dict[int, TableTexts] = field(default_factory=dict)
    _known: dict[str, Collection[str]] = field(default_factory=dict)
    _new: dict[int, dict[tuple[str, str], frozenset[int]]] = field(default_factory=dict)
    _voided: dict[int, PgSnapshot] = field(default_factory=dict)
    _points: Mapping[int, Lsn] = field(default_factory=dict)

    def take(self, batches: Iterable[TableBatch]) -> bool:
        """Accept changes; return whether one has a text that the last reading has not."""
        return sum(map(self._take, batches)) > 0

    def unjudged(self) -> frozenset[int]:
        """Return the tables with texts that no reading has judged yet."""
        return frozenset(self._new)

    def _take(self, batch: TableBatch) -> bool:
        last = self._last.get(batch.table.oid)
        if last is None:
            return False
        found = False
        for use in last.uses:
            values = _values(batch, use)
            known = self._known.get(use.type)
            if values is None or known is None:
                continue
            unknown = [t for t in pc.unique(values).to_pylist() if not _is_of(use.type, t, known)]
            if unknown:
                found |= self._note(batch, use, values, unknown)
        return found

    def _note(
        self, batch: TableBatch, use: TypeUse, values: pa.Array, unknown: Collection[str]
    ) -> bool:
        oid = batch.table.oid
        lsns = batch.rows.column("_cdc_lsn").to_numpy()
        xids = batch.rows.column("_cdc_xid").fill_null(0).to_numpy()
        counted = lsns >= self._points.get(oid, ZERO)
        if oid in self._voided:
            counted &= ~self._voided[oid].sees(xids) | (xids == 0)
        found = False
        for text in unknown:
            holding = counted
            if use.how == "value":
                holding = np.zeros_like(counted)
                holding[pc.indices_nonzero(pc.equal(values, text)).to_numpy()] = True
                holding &= counted
            if not holding.any():
                continue
            found = True
            new = self._new.setdefault(oid, {})
            if len(new) < _MOST:
                before = new.get((use.type, text), frozenset())
                new[use.type, text] = before | {int(xid) for xid in xids[holding]}
        return found

    def has_news(self, seen: PgSnapshot) -> bool:
        """Return whether there are texts that a reading which sees these transactions can judge."""
        return any(_is_seen(xids, seen) for new in self._new.values() for xids in new.values())

    def difference(self, oid: int, now: TableTexts, seen: PgSnapshot) -> str | None:
        """Say why rows of a table have another text in the lake; None if nothing speaks for it.

        `now`: how the catalog was just read, which sees the transactions that `seen` does.
        """
        texts = {found.type: found for found in now.types}
        for (type_, text), xids in self._new.get(oid, {}).items():
            if type_ not in texts or not _is_seen(xids, seen):
                continue
            objects = texts[type_]
            known = {*objects.objects.values(), *objects.temporary}
            if not _is_of(type_, text, known):
                return _REASON
        return None

    def read(
        self,
        looked_at: Mapping[int, TableTexts],
        seen: PgSnapshot,
        voided: Iterable[int],
        points: Mapping[int, Lsn],
    ) -> None:
        """Take another reading of the catalog, at which `difference` was asked of these tables.

        `voided`: those that are read again; `points`: where the lake's rows of each were read.
        """
        self._last = {oid: texts for oid, texts in looked_at.items() if texts.uses}
        types = {t.type: t for texts in self._last.values() for t in texts.types}
        self._known = {
            name: frozenset((*t.objects.values(), *t.temporary)) for name, t in types.items()
        }
        self._voided |= dict.fromkeys(voided, seen)
        self._points = points
        pending = {
            oid: {key: xids for key, xids in new.items() if not _is_seen(xids, seen)}
            for oid, new in self._new.items()
            if oid in looked_at
        }
        self._new = {oid: new for oid, new in pending.items() if new}


def read_at(known: Iterable[RegisteredTable]) -> dict[int, Lsn]:
    """Return where the lake's rows of each table were read, by its OID."""
    return {e.oid: e.snapshot_lsn for e in known if e.snapshot_lsn is not None}


def _values(batch: TableBatch, use: TypeUse) -> pa.Array | None:
    """Return a column's texts, or its elements'; None where the lake has no such texts."""
    if use.how == "within" or use.type == MONEY:
        return None
    for column in batch.table.columns:
        if column.name == use.column and column.mask is None:
            index = batch.rows.schema.get_field_index(column.lake_name)
            if index < 0:
                return None
            values = batch.rows.column(index)
            if use.how == "array":
                if not pa.types.is_list(values.type):
                    return None
                values = values.flatten()
            return values if pa.types.is_string(values.type) else None
    return None


def _is_of(type_: str, text: str | None, known: Collection[str]) -> bool:
    """Return whether a value's text names what is known, or what no object is."""
    if text is None:
        return True
    if type_ == "aclitem":
        return all(role in known or role.isdigit() for role in _roles(text))
    return text in known or text == "-" or text.isdigit()


def _roles(item: str) -> Iterator[str]:
    """Return the roles that an aclitem names: ``grantee=privileges/grantor``."""
    if item.startswith('"'):
        end = 1
        while end < len(item) and (item[end] != '"' or item[end : end + 2] == '""'):
            end += 2 if item[end] == '"' else 1
        grantee, rest = item[: end + 1], item[end + 1 :]
    else:
        grantee, _, rest = item.partition("=")
    for role in (grantee, rest.partition("/")[2]):
        if role:
            yield role[1:-1].replace('""', '"') if role.startswith('"') else role


def _is_seen(xids: Collection[int], seen: PgSnapshot) -> bool:
    real = [xid for xid in xids if xid]
    return bool(seen.sees(np.array(real, np.int64)).all())
