"""Texts in streamed changes that no object has any more.

An object may be renamed and renamed back, or created, referred to and dropped, between two catalog
polls, which then show nothing. The changes show it: the next poll does not find their text.
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
"""Limit for the texts kept per table: a single unknown one is enough."""
_REASON = "an object that its values refer to temporarily had another name"


@dataclass(slots=True)
class StreamedTexts:
    """Texts that the last catalog poll did not find. Used on the event loop only.

    `_last`: that poll, by table. `_known`: the texts of its objects, by type. `_new`: by the
    table's OID, the transactions that contained each new text of a type. `_voided` and `_points`:
    which rows are void, because the table is being or has been re-read.
    """

    _last: dict[int, TableTexts] = field(default_factory=dict)
    _known: dict[str, Collection[str]] = field(default_factory=dict)
    _new: dict[int, dict[tuple[str, str], frozenset[int]]] = field(default_factory=dict)
    _voided: dict[int, PgSnapshot] = field(default_factory=dict)
    _points: Mapping[int, Lsn] = field(default_factory=dict)

    def record_changes(self, batches: Iterable[TableBatch]) -> bool:
        """Record changes; return whether one has a text that the last poll did not find."""
        return sum(map(self._record_batch, batches)) > 0

    def unjudged(self) -> frozenset[int]:
        """Return the tables with texts that no poll has judged yet."""
        return frozenset(self._new)

    def _record_batch(self, batch: TableBatch) -> bool:
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
        """Return whether there are texts that a poll which sees these transactions can judge."""
        return any(_is_seen(xids, seen) for new in self._new.values() for xids in new.values())

    def difference(self, oid: int, now: TableTexts, seen: PgSnapshot) -> str | None:
        """Return why rows of a table have a different text in the lake; None without evidence.

        `now`: the catalog as just read; it sees the transactions that `seen` does.
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

    def record_poll(
        self,
        polled: Mapping[int, TableTexts],
        seen: PgSnapshot,
        voided: Iterable[int],
        points: Mapping[int, Lsn],
    ) -> None:
        """Record a catalog poll, at which `difference` was called for these tables.

        `voided`: those that are re-read. `points`: the position at which each was read.
        """
        self._last = {oid: texts for oid, texts in polled.items() if texts.uses}
        types = {t.type: t for texts in self._last.values() for t in texts.types}
        self._known = {
            name: frozenset((*t.objects.values(), *t.temporary)) for name, t in types.items()
        }
        self._voided |= dict.fromkeys(voided, seen)
        self._points = points
        pending = {
            oid: {key: xids for key, xids in new.items() if not _is_seen(xids, seen)}
            for oid, new in self._new.items()
            if oid in polled
        }
        self._new = {oid: new for oid, new in pending.items() if new}


def read_at(known: Iterable[RegisteredTable]) -> dict[int, Lsn]:
    """Return the position at which the lake's rows of each table were read, by its OID."""
    return {e.oid: e.snapshot_lsn for e in known if e.snapshot_lsn is not None}


def _values(batch: TableBatch, use: TypeUse) -> pa.Array | None:
    """Return a column's texts, or its elements'; None if the lake has no such texts."""
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
    """Return whether a value's text names a known object, or no object at all."""
    if text is None:
        return True
    if type_ == "aclitem":
        return all(role in known or role.isdigit() for role in _roles(text))
    return text in known or text == "-" or text.isdigit()


def _roles(item: str) -> Iterator[str]:
    """Yield the roles that an aclitem names: ``grantee=privileges/grantor``."""
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
