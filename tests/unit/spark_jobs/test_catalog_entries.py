"""Names and locations in a catalog, without Spark."""

from __future__ import annotations

import argparse

import pytest

from spark_jobs.catalog.entries import CatalogEntry, same_location
from spark_jobs.catalog.schema_name import SchemaName


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("main.shop", SchemaName("main", "shop")),
        ("`my catalog`.shop", SchemaName("my catalog", "shop")),
        ("a-b.`x.y``z`", SchemaName("a-b", "x.y`z")),
    ],
)
def test_a_schema_is_named_and_quoted(text: str, expected: SchemaName) -> None:
    assert SchemaName.parse(text) == expected
    assert SchemaName.parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "shop", "a.b.c", "a b.c", "a.`b", ".b", "a.", "a.``"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not CATALOG"):
        SchemaName.parse(text)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("file:/a/b", "/a/b", True),
        ("file:///a/b/", "/a/b", True),
        ("file:/a/b%20c", "/a/b c", True),
        ("/a/b%20c", "/a/b%20c", True),
        ("s3://x/y", "s3a://x/y", True),
        ("s3://x/y", "s3a://x/z", False),
        ("/a/b", "/a/bc", False),
        ("/a/b", "hdfs://a/b", False),
        ("", "/a", False),
    ],
)
def test_a_location_is_compared(one: str, other: str, *, expected: bool) -> None:
    assert same_location(one, other) is same_location(other, one) is expected
    assert CatalogEntry("EXTERNAL", "DELTA", one).is_at(other) is expected
    assert not CatalogEntry("EXTERNAL", "parquet", one).is_at(other)
