"""The fingerprint of a table's storage at a catalog reading, as stored in `_tables`.

`ingestd.postgres.rewrites.catalog_evidence` describes what two fingerprints prove.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ingestd.model.recorded import LONG, integer_of
from ingestd.postgres.catalog.user_types import TypeParts
from ingestd.postgres.rewrites.dependent_texts import NO_TEXTS, TableTexts

COMPARABLE_XIDS = 2_000_000_000
"""Transaction ids further apart can't be compared by age, which has 32 bits."""
MOST_TEXT_BYTES = 64 << 20
"""Maximum size of the text: a partition takes about 60 bytes, a type with texts 5 kB."""


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column's row in pg_attribute. `xmin`: the transaction that last altered it.

    `name`: a digest of its name (see `digest`). `default_oid`: OID of its pg_attrdef row, 0 if
    none.
    """

    number: int
    type_oid: int
    typmod: int
    xmin: int
    has_missing: bool
    name: str
    default_oid: int = 0


@dataclass(frozen=True, slots=True)
class KeyMark:
    """The primary key and the replica identity of a table, and what enforces them.

    `replica_identity`: pg_class.relreplident. `key`, `identity`: numbers of their columns.
    `key_by`, `identity_by`: the OID of the constraint, which REINDEX CONCURRENTLY keeps, or of the
    index if there is no constraint; 0 for none.
    """

    replica_identity: str
    key: tuple[int, ...] = ()
    key_by: int = 0
    identity: tuple[int, ...] = ()
    identity_by: int = 0

    def __str__(self) -> str:
        key, identity = (".".join(map(str, n)) for n in (self.key, self.identity))
        return f"{self.replica_identity}:{key}:{self.key_by}:{identity}:{self.identity_by}"

    @classmethod
    def parse(cls, text: str) -> KeyMark:
        """Parse what `str` returned. Raises ValueError."""
        replica_identity, key, key_by, identity, identity_by = text.split(":")
        return cls(
            replica_identity,
            _numbers(key),
            integer_of(key_by),
            _numbers(identity),
            integer_of(identity_by),
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(integer_of(n) for n in text.split(".") if n)


def _pairs(text: str) -> dict[int, int]:
    pairs = (x.split(":") for x in text.split(",") if x)
    return {integer_of(oid): integer_of(value) for oid, value in pairs}


@dataclass(frozen=True, slots=True)
class TableFingerprint:
    """How a table's rows were stored at some time.

    `columns`: those that can be sent. `files`: pg_relation_filenode by the OID of the table, or of
    each of its leaf partitions. `row_filter`: a digest of the publication's, empty if none.
    `former`: digests of names that columns once had and none has now. `membership`: OID of the
    publication's entry for the table, 0 if none. `types`: the component types of user-defined
    column types. `ended`: the transaction id (64 bits) below which all had ended then, 0 if
    unknown. `attach_xids`: by OID of each partition, at any level, the transactions that attached
    it and its ancestors. `publication`: its mark, empty if none. `numbered`: how many columns it
    has ever had. `dropped`: the numbers of those dropped, and `unlisted` those that the
    publication's column list omits; both are set only if just read. `key`: its key and replica
    identity, None if an older lake lacks them. `schema_xid`: the transaction that put it into its
    schema, empty if unknown.
    `toast`: the OID of the TOAST table by OID of the table, or of each of its leaf partitions, 0
    for none.

    `empty`: leaf partitions without blocks and without changes in the stream since. `is_streamed`:
    whether a publication sends the changes. `is_listed`: whether the publication has an entry for
    the table, so that the server refuses to make it UNLOGGED; set only if just read. `is_doubted`:
    the stream showed something that no catalog reading had judged yet. `texts`: what the texts of
    its values depend on.
    """

    columns: tuple[StoredColumn, ...]
    files: Mapping[int, int]
    row_filter: str = ""
    former: frozenset[str] = frozenset()
    membership: int = 0
    types: tuple[TypeParts, ...] = ()
    ended: int = field(default=0, compare=False)
    attach_xids: Mapping[int, str] = field(default_factory=dict)
    publication: str = ""
    numbered: int = 0
    dropped: frozenset[int] = field(default=frozenset(), compare=False)
    unlisted: frozenset[int] = field(default=frozenset(), compare=False)
    key: KeyMark | None = None
    schema_xid: str = ""
    toast: Mapping[int, int] = field(default_factory=dict)
    empty: frozenset[int] = frozenset()
    is_doubted: bool = False
    texts: TableTexts = NO_TEXTS
    is_streamed: bool = field(default=True, compare=False)
    is_listed: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        """Serialize it for `_tables`."""
        columns = (
            f"{c.number}:{c.type_oid}:{c.typmod}:{c.xmin}:{c.name}:{c.default_oid}"
            f"{':m' * c.has_missing}"
            for c in self.columns
        )
        files = (f"{oid}:{file}" for oid, file in self.files.items())
        lists = [columns, files, [self.row_filter], sorted(self.former), [self.membership]]
        attached = (f"{oid}:{xids}" for oid, xids in self.attach_xids.items())
        parts: list[Iterable[object]] = [*lists, self.types, [self.ended], attached]
        parts += [[self.publication], [self.numbered]]
        if self.key is not None:
            parts.append([f"key={self.key}"])
        parts += [[f"home={self.schema_xid}"], [f"streamed={self.is_streamed:d}"]]
        if self.is_doubted:
            parts.append(["doubted=1"])
        parts.append([f"empty={'.'.join(map(str, sorted(self.empty)))}"])
        parts.append(["toast=" + ",".join(f"{oid}:{toast}" for oid, toast in self.toast.items())])
        if self.texts.types:
            parts.append([self.texts])
        return "|".join(",".join(map(str, part)) for part in parts)

    @classmethod
    def parse(cls, text: str) -> TableFingerprint | None:
        """Parse what `str` returned; None for anything else, such as an older lake's format."""
        if len(text) > MOST_TEXT_BYTES:
            return None
        try:
            columns, files, row_filter, former, membership, types, *more = text.split("|")
            ended, attached, publication, numbered = (*more, "", "", "", "")[:4]
            named = dict(part.split("=", 1) for part in more[4:])
            return cls(
                tuple(_column(c) for c in columns.split(",") if c),
                _pairs(files),
                row_filter,
                frozenset(f for f in former.split(",") if f),
                integer_of(membership),
                tuple(TypeParts.parse(t) for t in types.split(",") if t),
                integer_of(ended or "0"),
                {integer_of(o): p for o, p in (x.split(":") for x in attached.split(",") if x)},
                publication,
                integer_of(numbered or "0"),
                key=KeyMark.parse(named["key"]) if "key" in named else None,
                schema_xid=named.get("home", ""),
                toast=_pairs(named.get("toast", "")),
                empty=frozenset(_numbers(named.get("empty", ""))),
                is_doubted="doubted" in named,
                is_streamed=named.get("streamed", "0") == "1" or not integer_of(ended or "0"),
                texts=TableTexts.parse(named.get("texts", "")),
            )
        except ValueError:
            return None

    def differs_durably(self, other: TableFingerprint) -> bool:
        """Return whether it differs from `other` enough to be recorded.

        Different files of a table without partitions do not count. Neither does a later `ended`,
        unless it is so much later that the next start could not compare transaction ids with it.
        """
        is_stale = self.ended - other.ended > COMPARABLE_XIDS // 4
        are_same = not self.attach_xids and self.files.keys() == other.files.keys()
        files = other.files if are_same else self.files
        return is_stale or replace(self, files=files) != other

    def partitions_since(self, then: TableFingerprint | None, oid: int) -> frozenset[int]:
        """Return the partitions of table `oid` that were added since an earlier reading."""
        return (
            frozenset()
            if then is None
            else frozenset(self.files.keys() - then.files.keys() - {oid})
        )

    def after(self, then: TableFingerprint) -> TableFingerprint:
        """Return it with the former names of its columns."""
        present = {c.name for c in self.columns}
        once = then.former | {c.name for c in then.columns}
        return replace(self, former=(self.former | once) - present)


def _column(text: str) -> StoredColumn:
    *numbers, name, default_oid = text.removesuffix(":m").split(":")
    number, type_oid, typmod, xmin = (integer_of(n, -LONG) for n in numbers)
    has_missing = text.endswith(":m")
    return StoredColumn(number, type_oid, typmod, xmin, has_missing, name, integer_of(default_oid))


def digest(text: str | None) -> str:
    """Return a digest that identifies a name or row filter; empty for none."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
