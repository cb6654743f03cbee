"""Names with bytes that are no characters: each has a text of its own, whatever the others are."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.relation import parse_relation
from ingestd.decode.values.encodings import OddName, encoding_of, name_of
from ingestd.postgres.connection.names import tables_apart

ENCODINGS = (None, "WIN1252", "EUC_JP")
PIECES = st.sampled_from([b"a", b"\\x81", b"\\xff", b"\x81", b"\xff", b"\xa9\xa1", b" (2)", b"\\"])
NAMES = st.lists(PIECES, min_size=1, max_size=3).map(b"".join)
"""Bytes that no encoding has, and the texts that these are written as."""


def encoded(name: str, encoding: str | None) -> bytes:
    return (
        name.raw
        if isinstance(name, OddName)
        else name.encode({None: "utf-8", "WIN1252": "cp1252", "EUC_JP": "euc_jp"}[encoding])
    )


@given(st.lists(NAMES, unique=True, max_size=8), st.sampled_from(ENCODINGS))
def test_each_column_of_a_relation_has_a_name_of_its_own(
    names: list[bytes], encoding: str | None
) -> None:
    """I8: else an uncaptured table stops its source."""
    told = b"".join(b"\1" + name + b"\0" + struct.pack(">Ii", 23, -1) for name in names)
    head = b"R" + struct.pack(">I", 5) + b"public\0t\0d" + struct.pack(">h", len(names))
    relation = parse_relation(head + told, encoding_of(encoding or "UTF8"))
    found = [column.name for column in relation.columns]
    assert len(set(found)) == len(names)
    for name, text in zip(names, found, strict=True):
        assert encoded(text, encoding) == name  # those without odd bytes stay what they are


@given(st.lists(st.tuples(NAMES, NAMES), unique=True, max_size=8), st.sampled_from(ENCODINGS))
def test_each_table_has_a_name_of_its_own(
    tables: list[tuple[bytes, bytes]], encoding: str | None
) -> None:
    """A table that can be captured is not taken for another that can't be named."""
    known = encoding_of(encoding or "UTF8")
    found = tables_apart([(name_of(s, known), name_of(t, known)) for s, t in tables])
    assert len(set(found)) == len(tables)
    for raw, names in zip(tables, found, strict=True):
        assert tuple(encoded(name, encoding) for name in names) == raw
