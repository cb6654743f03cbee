"""Options of the data source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingestd.model.errors import ConfigError
from ingestd.model.schema import TableId
from spark_jobs.source.options import SourceOptions, parse_options

NEEDED = {"config": "c.toml", "source": "shop", "table": "public.orders"}


def test_only_three_are_needed() -> None:
    wanted = SourceOptions(Path("c.toml"), "shop", TableId("public", "orders"))
    assert parse_options(NEEDED) == wanted


def test_every_option_is_read() -> None:
    found = parse_options(
        NEEDED
        | {
            "columns": "id, note",
            "where": "id > 1",
            "limit": "0",
            "partitions": "3",
            "split_bytes": "1MB",
            "resumable": "TRUE",
            "raw": "false",
            "pushdown": "true",
            "snapshot_idle": "500ms",
            "snapshot_limit": "1h",
            "keeper_host": "10.0.0.1",
        }
    )
    assert found.columns == ("id", "note")
    assert (found.limit, found.partitions, found.split_bytes) == (0, 3, 1_000_000)
    assert (found.resumable, found.raw, found.pushdown) == (True, False, True)
    assert (found.snapshot_idle, found.snapshot_limit) == (0.5, 3600.0)
    assert (found.where, found.keeper_host) == ("id > 1", "10.0.0.1")


def test_names_with_commas_are_a_json_array() -> None:
    assert parse_options(NEEDED | {"columns": '["a,b", " c"]'}).columns == ("a,b", " c")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("colums", "id", "did you mean 'columns'?"),
        ("path", "/x", "load() accepts no path"),
        ("zzz", "", "the options are config, source"),
        ("columns", "id,,b", "write names"),
        ("columns", "id,id", "a name appears twice"),
        ("columns", "[1]", "write names"),
        ("columns", "[", "not a JSON array"),
        ("where", " ", "is empty"),
        ("limit", "-1", "write a whole number"),
        ("partitions", "0", "write a whole number above 0"),
        ("split_bytes", "64", "not a size"),
        ("snapshot_idle", "5", "not a duration"),
        ("raw", "yes", "write true or false"),
        ("table", "orders", "is not `schema.table`"),
    ],
)
def test_what_can_not_be_read_is_said(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        parse_options(NEEDED | {name: value})
    assert name in str(raised.value) or name == "path"


@pytest.mark.parametrize("name", sorted(NEEDED))
def test_what_is_missing_is_said(name: str) -> None:
    given = {key: value for key, value in NEEDED.items() if key != name}
    with pytest.raises(ConfigError, match=f"option {name} is missing"):
        parse_options(given)
