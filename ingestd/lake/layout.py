"""The layout of the lake, and the mapping of names to path segments (design section 2).

Source of the mapping: ISO/IEC 9075-14, "Mapping SQL identifiers to XML names"; Postgres implements
it as map_sql_identifier_to_xml_name (src/backend/utils/adt/xml.c). Fewer characters are kept here,
so that a segment is safe on every file system and object store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId

MAX_SEGMENT_BYTES = 255
"""Limit of a file name on the usual file systems."""

_STAYS = re.compile(r"[A-Za-z0-9_.-]")
_MAPPED = re.compile(r"_x([0-9A-F]{4,6})_")
_NOT_TEXT = re.compile("[\\0\ud800-\udfff]")
"""No name in Postgres has NUL or half a surrogate pair."""


def segment(name: str) -> str:
    """Map a name to a path segment; `name_of` is the inverse. Raise ValueError if empty."""
    if not name:
        msg = "a name can't be empty"
        raise ValueError(msg)
    parts: list[str] = []
    for index, char in enumerate(name):
        stays = _STAYS.match(char) is not None
        leads = index == 0 and char in "_."
        escapes = char == "_" and name[index + 1 : index + 2] == "x"
        parts.append(char if stays and not leads and not escapes else f"_x{ord(char):04X}_")
    return "".join(parts)


def name_of(path_segment: str) -> str | None:
    """Return the name from which `segment` made this segment; None if it made it from none.

    Anyone who can write to the lake can make a folder of any name.
    """
    parts: list[str] = []
    for index, part in enumerate(_MAPPED.split(path_segment)):
        code = int(part, 16) if index % 2 else 0
        if code > sys.maxunicode:
            return None
        parts.append(chr(code) if index % 2 else part)
    name = "".join(parts)
    is_text = name and not _NOT_TEXT.search(name)
    return name if is_text and segment(name) == path_segment else None


OWN_FOLDERS = frozenset({"_epochs", "_tables", "_ref"})
"""The folders of a source besides those of schemas: no schema's name maps to one of these."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one source's tables, relative to the lake's root."""

    source: str

    @property
    def root(self) -> str:
        """The source's folder."""
        return segment(self.source)

    @property
    def epochs(self) -> str:
        """The table `_epochs`."""
        return f"{self.root}/_epochs"

    @property
    def tables(self) -> str:
        """The table `_tables`."""
        return f"{self.root}/_tables"

    def raw(self, table: TableId) -> str:
        """Return the path of a raw table. Raise TableError if a name is too long for a path."""
        return self._of(table, self.root)

    def reference(self, table: TableId) -> str:
        """Return the path of a table of current rows, in `_ref`. Raise TableError as `raw` does."""
        return self._of(table, f"{self.root}/_ref")

    def _of(self, table: TableId, folder: str) -> str:
        parts = [segment(table.schema), segment(table.name)]
        for part in parts:
            if len(part.encode()) > MAX_SEGMENT_BYTES:
                raise TableError(
                    table,
                    f"its path segment {part[:40]}... has {len(part)} bytes,"
                    f" more than the {MAX_SEGMENT_BYTES} that file systems allow",
                    remedy="rename it in the source, or leave it out with a `!pattern` in `tables`",
                )
        return "/".join([folder, *parts])

    def table_of(self, schema_segment: str, table_segment: str) -> TableId | None:
        """Return the table whose raw table is in these two folders; None if it is no table's."""
        schema, name = name_of(schema_segment), name_of(table_segment)
        return None if schema is None or name is None else TableId(schema, name)

    def app_id(self, table: TableId | None = None) -> str:
        """Return the name of the Delta app transaction of a raw table, or of the epochs (I3)."""
        return f"ingestd/{self.source}" if table is None else f"ingestd/{self.source}/{table}"

    def reference_app_id(self, table: TableId) -> str:
        """Return the name of the Delta app transaction of a reference table."""
        return f"ingestd/{self.source}/_ref/{table}"


def local_tables(root: Path, source: str) -> Iterator[TableId]:
    """Yield the tables of a source in a folder, for shell completion: no store is opened.

    `ingestd.lake.table_folders` lists those of any store. Raise OSError.
    """
    layout = Layout(source)
    for schema in (root / layout.root).iterdir():
        if schema.name not in OWN_FOLDERS and schema.is_dir():
            for table in schema.iterdir():
                if table.is_dir() and (found := layout.table_of(schema.name, table.name)):
                    yield found
