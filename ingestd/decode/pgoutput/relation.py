"""RELATION messages: the definition of a table from their position in the stream on.

Source: PostgreSQL documentation, "Logical Replication Message Formats", Relation.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from ingestd.decode.type_mapping import BUILT_IN, lake_type
from ingestd.decode.values.encodings import Encoding, distinct_names, name_of
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import Column, ReplicaIdentity, Table, TableId, with_before

_IDENTITIES: dict[int, ReplicaIdentity] = {ord(c): c for c in get_args(ReplicaIdentity)}
_OID = struct.Struct(">I")
_IDENTITY_AND_COUNT = struct.Struct(">Bh")
_TYPE = struct.Struct(">Ii")


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of the message. With REPLICA IDENTITY FULL every column is `identity`."""

    name: str
    type_oid: int
    typmod: int
    identity: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """A table's definition in the stream; it applies to later messages with its `oid`.

    `lsn` and `xid`: commit position and id of the transaction that contained it.
    """

    oid: int
    id: TableId
    replica_identity: ReplicaIdentity
    columns: tuple[RelationColumn, ...]
    lsn: Lsn = field(default=ZERO, compare=False)
    xid: int = field(default=0, compare=False)


ResolveRelation = Callable[[Relation], Table | None]
"""Returns the captured table of a relation; None: its changes are dropped and not counted."""
ReportPartition = Callable[[Relation, int], None]
"""Called with a partition, and the OID of the table as which its changes are sent."""


def parse_relation(message: bytes, encoding: Encoding | None = None) -> Relation:
    r"""Parse an 'R' message, including the type byte, with names in `encoding` (None: UTF-8).

    A name that can't be converted is not an error: it becomes an `OddName`, and the names of
    columns are kept distinct. Raises ProtocolError.
    """
    try:
        return _parse(message, encoding)
    except (struct.error, ValueError, KeyError) as error:  # ValueError: no NUL
        msg = f"malformed RELATION message: {error}"
        raise ProtocolError(msg) from error


def _parse(message: bytes, encoding: Encoding | None) -> Relation:
    (oid,) = _OID.unpack_from(message, 1)
    schema, at = _name(message, 5, encoding)
    name, at = _name(message, at, encoding)
    identity, count = _IDENTITY_AND_COUNT.unpack_from(message, at)
    at += _IDENTITY_AND_COUNT.size
    names, shapes = [], []
    for _ in range(count):
        flags = message[at : at + 1]
        column, at = _name(message, at + 1, encoding)
        type_oid, typmod = _TYPE.unpack_from(message, at)
        at += _TYPE.size
        names.append(column)
        shapes.append((type_oid, typmod, bool(flags[0] & 1)))
    if at != len(message) or count < 0:
        msg = f"{count} columns do not fill the message"
        raise ValueError(msg)
    apart = distinct_names(names)
    columns = [RelationColumn(n, *shape) for n, shape in zip(apart, shapes, strict=True)]
    if len(set(apart)) != count:
        msg = "two columns of one name"
        raise ValueError(msg)
    where = TableId(schema or "pg_catalog", name)
    return Relation(oid, where, _IDENTITIES[identity], tuple(columns))


def _name(message: bytes, at: int, encoding: Encoding | None) -> tuple[str, int]:
    end = message.index(b"\0", at)
    return name_of(message[at:end], encoding), end + 1


def table_of(relation: Relation) -> Table:
    """Return a table from the message alone: built-in types, no key, no comments."""
    columns = tuple(
        Column(
            c.name,
            c.type_oid,
            c.typmod,
            lake_type(c.type_oid, c.typmod, BUILT_IN),
            identity=c.identity,
        )
        for c in relation.columns
    )
    table = Table(relation.id, relation.oid, columns, relation.replica_identity)
    return with_before(table, full=False)
