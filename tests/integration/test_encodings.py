"""Values in other encodings are those of the server's own conversion, else refused."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from ingestd.decode.values.cast import cast, raw_texts
from ingestd.decode.values.encodings import _MULTIPLE, _SINGLE, Encoding, encoding_of
from tests.unit.decode.conftest import decoding
from tests.unit.decode.test_encodings import texts

if TYPE_CHECKING:
    from tests.harness.databases import Database

__all__ = ["decoding"]

_CONVERSION = """
CREATE FUNCTION pg_temp.utf8(value bytea, encoding name) RETURNS bytea LANGUAGE plpgsql AS $$
BEGIN RETURN convert(value, encoding, 'UTF8'); EXCEPTION WHEN others THEN RETURN NULL; END $$
"""


def sequences(encoding: Encoding) -> list[bytes]:
    """Each byte, each pair in multi-byte encodings, triples of a third set; in words too."""
    high = range(0x80, 0x100)
    found = [bytes([n]) for n in range(1, 0x100)]
    if not encoding.is_single:
        found += [bytes(pair) for pair in product(high, high)]
    if encoding.name in {"EUC_JP", "EUC_JIS_2004"}:
        found += [bytes([0x8F, *pair]) for pair in product(range(0xA1, 0xFF), range(0xA1, 0xFF))]
    return found + [b"a" + value + b"z" for value in found[0x7F:0xFF]]


@pytest.mark.parametrize("name", sorted(_SINGLE | _MULTIPLE))
def test_each_value_is_what_the_server_converts_it_to(database: Database, name: str) -> None:
    encoding = encoding_of(name)
    assert encoding is not None
    values = sequences(encoding)
    with database.connect() as connection:
        connection.execute(_CONVERSION)
        rows = connection.execute(
            "SELECT pg_temp.utf8(v, %s) FROM unnest(%s::bytea[]) WITH ORDINALITY AS t(v, n)"
            " ORDER BY n",
            (name, values),
        ).fetchall()
    told = [None if value is None else bytes(value).decode() for (value,) in rows]
    given = texts(values, encoding)
    array, refused = cast(given, pa.string())
    assert array.to_pylist() == told
    hexed = [f"\\x{v.hex()}" for v, t in zip(values, told, strict=True) if t is None]
    assert raw_texts(given[refused]).to_pylist() == hexed
    for value, text in zip(values, told, strict=True):
        if text is not None and len(value) < 3:
            assert encoding.decode(encoding.encode(text)) == text
