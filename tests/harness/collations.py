"""Collations that do not order and compare by bytes, if the server has ICU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.harness.databases import Database


def make_collations(database: Database) -> None:
    """Create `german`, and `ignoring`, which ignores the case of letters.

    On a server built without ICU, both are copies of "C".
    """
    if database.value("SELECT EXISTS (SELECT FROM pg_collation WHERE collname = 'de-x-icu')"):
        database.execute(
            "CREATE COLLATION german (provider = icu, locale = 'de')",
            "CREATE COLLATION ignoring (provider = icu, locale = 'und-u-ks-level2',"
            " deterministic = false)",
        )
    else:
        database.execute('CREATE COLLATION german FROM "C"', 'CREATE COLLATION ignoring FROM "C"')
