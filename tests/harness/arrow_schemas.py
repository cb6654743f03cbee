"""Schemas of Arrow as a Parquet file has them in its metadata, written by hand.

Source: FlatBuffers, "Internals"; Arrow, `Message.fbs` and `Schema.fbs`.
"""

from __future__ import annotations

import base64
import io
import struct

import pyarrow as pa
import pyarrow.parquet as pq

KEY = "ARROW:schema"
_UTF8 = 5


class _Buffer:
    """A buffer of FlatBuffers. References lead forward."""

    def __init__(self) -> None:
        self.content = bytearray(4)

    def table(self, *layout: int, size: int) -> int:
        """Append a table of zeros; return its place. `layout`: where each field is, 0: absent."""
        begin = len(self.content)
        self.content += struct.pack(f"<{2 + len(layout)}H", 4 + 2 * len(layout), size, *layout)
        self.content += bytes(-len(self.content) % 4)
        place = len(self.content)
        self.content += struct.pack("<i", place - begin) + bytes(size - 4)
        return place

    def append(self, content: bytes) -> int:
        place = len(self.content)
        self.content += content
        return place

    def refer(self, at: int, to: int) -> None:
        self.content[at : at + 4] = struct.pack("<I", to - at)


def one_field_many_times(fields: int, name_bytes: int) -> bytes:
    """Return the schema of a Parquet file that has one field of texts so often, with one name."""
    out = _Buffer()
    message = out.table(4, 6, 8, size=12)
    out.refer(0, message)
    out.content[message + 4 : message + 7] = struct.pack("<HB", 4, 1)  # version 5, a schema
    schema = out.table(0, 4, size=8)
    out.refer(message + 8, schema)
    vector = out.append(struct.pack("<I", fields) + bytes(4 * fields))
    out.refer(schema + 4, vector)
    field = out.table(4, 8, 9, 12, 0, 16, size=20)
    for number in range(fields):
        out.refer(vector + 4 + 4 * number, field)
    out.content[field + 8 : field + 10] = bytes([1, _UTF8])
    out.refer(field + 12, out.table(size=4))
    out.refer(field + 16, out.append(bytes(4)))
    name = struct.pack("<I", name_bytes) + b"n" * name_bytes + bytes(1)
    out.refer(field + 4, out.append(name))
    out.content += bytes(-len(out.content) % 8)
    return b"\xff\xff\xff\xff" + struct.pack("<i", len(out.content)) + bytes(out.content)


def parquet_with(rows: pa.Table, schema: bytes) -> bytes:
    """Return a Parquet file of rows with this schema of Arrow."""
    file = io.BytesIO()
    with pq.ParquetWriter(file, rows.schema, store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({KEY: base64.b64encode(schema).decode()})
    return file.getvalue()
