from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ingestd.lake.definitions import Registry
from ingestd.model.errors import FolderError

BEGAN = datetime(2026, 11, 25, tzinfo=UTC)


def event(at_lsn: int, *columns: tuple[str, str]) -> dict[str, Any]:
    """Columns: (the lake's name, the source's)."""
    return {
        "table": "public.t",
        "oid": 1,
        "state": "live",
        "reason": None,
        "schema_version": at_lsn,
        "snapshot_lsn": 1,
        "at_lsn": at_lsn,
        "at": BEGAN + timedelta(seconds=at_lsn),
        "replica_identity": "d",
        "progress": None,
        "columns": [
            {
                "name": name,
                "source_name": source,
                "delta_type": "string",
                "pg_type": "text",
                "type_oid": 25,
                "identity": source == "id",
                "missing": None,
                "comment": None,
            }
            for name, source in columns
        ],
    }


def test_each_time_that_a_lake_column_takes_values_is_a_life() -> None:
    """A source column of another type is the same one; one that was dropped before is not."""
    key, x, other = ("id", "id"), ("x", "x"), ("x__v2", "x")
    events = [
        event(5, key, x),
        event(10, key),
        event(20, key, other),  # re-created with another type
        event(30, key, x),  # altered back to the first one
        event(40, key),
        event(50, key, x),
    ]
    found = Registry(events).at("public.t")
    assert found is not None
    assert [
        (c.name, c.since_lsn, c.from_lsn, c.until_lsn, c.is_again)
        for c in found.lives
        if c.name != "id"
    ] == [
        ("x", 0, 0, 10, False),
        ("x__v2", 20, 20, 30, True),
        ("x", 20, 30, 40, True),
        ("x", 50, 50, None, True),
    ]
    assert [(c.name, c.since_lsn) for c in found.columns] == [("id", 0), ("x", 50)]
    assert found.columns[1].since == BEGAN + timedelta(seconds=50)
    early = Registry(events).at("public.t", 25)
    assert early is not None
    assert [(c.name, c.until_lsn) for c in early.columns] == [("id", None), ("x__v2", None)]


def test_a_column_knows_that_its_source_had_another_type() -> None:
    """Of one that is stored as the same type: text that became jsonb in place."""
    events = [event(n, ("x", "x"), ("y", "y")) for n in (5, 10, 20)]
    events[1]["columns"][0]["type_oid"] = 3802
    found = [Registry(events[: n + 1]).at("public.t") for n in range(3)]
    assert [[c.had_other_type for c in one.columns] for one in found if one is not None] == [
        [False, False],
        [True, False],
        [True, False],
    ]


def typed(kind: object) -> dict[str, Any]:
    found = event(5, ("x", "x"))
    found["columns"][0]["delta_type"] = kind
    return found


@pytest.mark.parametrize(
    ("recorded", "kind"),
    [
        ("decimal(12,2)", "decimal(12,2)"),
        ("array<timestamp_ntz>", "array<timestamp_ntz>"),
        ("struct<a:long,`b c`:string>", "struct<a:long,`b c`:string>"),
        ("struct<a b:long>", "struct<`a b`:long>"),  # of an earlier version
        ("struct<a) IS NULL OR (true:long>", "struct<`a) IS NULL OR (true`:long>"),
    ],
)
def test_a_type_is_written_as_a_type_of_sql(recorded: str, kind: str) -> None:
    found = Registry([typed(recorded)]).at("public.t")
    assert found is not None
    assert found.columns[0].delta_type == kind


NO_TYPES: dict[str, object] = {
    "expression": "string) = reflect('java.lang.System', 'getenv', 'X') OR CAST(NULL AS string",
    "clause": "long) USING delta LOCATION '/elsewhere' --",
    "comment": "long COMMENT 'x'",
    "constraint": "decimal(12,2) NOT NULL",
    "bracket": "array<long>>",
    "depth": "array<" * 5000 + "long" + ">" * 5000,
    "digits": f"decimal({'9' * 11},1)",
    "length": f"struct<{'a' * (1 << 18)}:long>",
    "empty": "",
    "null": None,
    "number": 7,
}


@pytest.mark.attack("lake writer")
@pytest.mark.parametrize("kind", NO_TYPES)
def test_no_other_sql_is_believed_to_be_a_type(kind: str) -> None:
    """The Spark jobs write it into statements and expressions."""
    with pytest.raises(FolderError, match="is no type"):
        Registry([typed(NO_TYPES[kind])]).at("public.t")
