"""The names that tables of a source have in a catalog (Hive, Unity Catalog, Glue).

Catalogs compare names without case, and some accept only ASCII letters, digits and underscores. So
`public.orders` is `orders`, and `sales.orders` is `sales__orders`. Any other name is written with
such characters and a part of its hash: `public."Order items"` is `public__order_items__` and 32
hexadecimal digits, too many to find a second name with the same ones. A name depends on no
other table, and no two tables have the same name.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.model.schema import TableId

MAX_LENGTH = 120
"""Of a name: Hive's metastore allows 128 characters in older versions."""

_PLAIN = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*\Z", re.ASCII)
_OTHERS = re.compile(r"[^a-z0-9]+", re.ASCII)
_DEFAULT_SCHEMA = "public"
_HASHED = 32


def catalog_name(table: TableId, prefix: str = "") -> str:
    """Return a table's name in a catalog. `prefix`: of all names of its kind, such as `_ref__`."""
    is_plain = bool(_PLAIN.match(table.schema) and _PLAIN.match(table.name))
    own = table.name if table.schema == _DEFAULT_SCHEMA else f"{table.schema}__{table.name}"
    if is_plain and len(prefix) + len(own) <= MAX_LENGTH:
        return prefix + own
    digest = hashlib.sha256(f"{table.schema}\0{table.name}".encode()).hexdigest()[:_HASHED]
    parts = (_OTHERS.sub("_", part.lower()).strip("_") for part in (table.schema, table.name))
    readable = "__".join(part or "x" for part in parts)
    room = MAX_LENGTH - len(prefix) - len("__") - _HASHED
    return f"{prefix}{readable[:room].rstrip('_')}__{digest}"
