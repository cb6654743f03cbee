"""Faults of tables whose changes would be missing, match no row, or be refused."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from ingestd.model.schema import Column, Table, TableId
from ingestd.postgres.catalog.publication import Published
from ingestd.postgres.catalog.replica_identity import (
    Partition,
    PublishedIdentity,
    incomplete,
    only_inserts,
)

P = TableId("public", "p")
LEAF = TableId("public", "leaf")
KEYED = Table(
    P,
    1,
    tuple(
        Column(n, 23, -1, pa.int32(), pg_type="integer", identity=n == "k") for n in ("k", "j", "n")
    ),
    "d",
    ("k",),
)
WHOLE = replace(
    KEYED,
    columns=tuple(replace(c, identity=True) for c in KEYED.columns),
    replica_identity="f",
    key=(),
)
BY_INDEX = replace(
    KEYED,
    columns=tuple(replace(c, identity=c.name != "n") for c in KEYED.columns),
    replica_identity="i",
)
NOTHING = replace(
    KEYED,
    columns=tuple(replace(c, identity=False) for c in KEYED.columns),
    replica_identity="n",
)
DEFAULT_LEAF = Partition(LEAF, whole=False, columns=frozenset("k"))
FULL_LEAF = Partition(LEAF, whole=True, columns=frozenset())
BARE_LEAF = Partition(LEAF, whole=False, columns=frozenset())
OURS = Published(None, None, 5)
THEIRS = Published(None, None, None)


def said(
    table: Table, sending: PublishedIdentity, found: Published | None = None
) -> tuple[str, str]:
    """The reason and the remedy; empty ones if there is nothing to say."""
    error = incomplete(table, found, manage=True, sending=sending)
    return ("", "") if error is None else (error.reason, error.remedy or "")


@pytest.mark.parametrize(
    ("table", "leaf"),
    [
        (KEYED, DEFAULT_LEAF),
        (KEYED, FULL_LEAF),
        (WHOLE, FULL_LEAF),
        (replace(WHOLE, key=("k",)), DEFAULT_LEAF),
        (BY_INDEX, FULL_LEAF),
        (BY_INDEX, Partition(LEAF, whole=False, columns=frozenset("kj"))),
    ],
)
def test_what_tells_rows_apart_is_taken(table: Table, leaf: Partition) -> None:
    assert said(table, PublishedIdentity(partitions=(leaf,))) == ("", "")


FULL_LEAVES, DEFAULT_LEAVES = ("isleaf", "IDENTITY FULL"), ("isleaf", "IDENTITY DEFAULT")
NEW_KEY = ("add a primary key without generated columns; then", "IDENTITY DEFAULT")


@pytest.mark.parametrize(
    ("table", "leaf", "reason", "remedy", "remedy_18"),
    [
        (KEYED, BARE_LEAF, "no usable", DEFAULT_LEAVES, DEFAULT_LEAVES),
        (WHOLE, BARE_LEAF, "no usable", FULL_LEAVES, NEW_KEY),
        (WHOLE, DEFAULT_LEAF, "not send complete old rows", FULL_LEAVES, NEW_KEY),
        (BY_INDEX, DEFAULT_LEAF, "lacks 'j'", FULL_LEAVES, ("IDENTITY DEFAULT",)),
        (BY_INDEX, BARE_LEAF, "no usable", FULL_LEAVES, ("IDENTITY DEFAULT",)),
        (NOTHING, DEFAULT_LEAF, "the table has none", ("IDENTITY DEFAULT",), ("IDENTITY DEFAULT",)),
        (NOTHING, BARE_LEAF, "no usable", ("IDENTITY DEFAULT",), ("IDENTITY DEFAULT",)),
        (
            replace(NOTHING, key=()),
            FULL_LEAF,
            "the table has none",
            ("a primary key, or",),
            NEW_KEY,
        ),
    ],
)
def test_a_remedy_is_one_that_the_server_takes(
    table: Table,
    leaf: Partition,
    reason: str,
    remedy: tuple[str, ...],
    remedy_18: tuple[str, ...],
) -> None:
    """18 accepts no full identity without a generated column."""
    for minds, words in ((False, remedy), (True, remedy_18)):
        sending = PublishedIdentity(
            frozenset("g"), partitions=(leaf,), refuses_unsent_identity=minds
        )
        if minds and leaf.whole:
            continue  # refused for that
        told, helps = said(table, sending)
        assert reason in told
        for word in words:
            assert word in helps
        assert "FULL" not in helps or not minds


@pytest.mark.parametrize(
    ("minds", "helps"), [(False, "IDENTITY FULL"), (True, "add a primary key")]
)
def test_a_key_with_a_column_that_is_not_sent(*, minds: bool, helps: str) -> None:
    sending = PublishedIdentity(frozenset("g"), frozenset("g"), refuses_unsent_identity=minds)
    reason, remedy = said(replace(KEYED, key=()), sending)
    assert "generated column 'g', which is not published" in reason
    assert helps in remedy
    reason, remedy = said(BY_INDEX, sending)
    assert "IDENTITY DEFAULT" in remedy
    # Where others publish it, 18 lets only inserts by.
    assert (said(BY_INDEX, sending, THEIRS) == ("", "")) is minds
    assert (only_inserts(BY_INDEX, THEIRS, sending) is not None) is minds


def test_who_publishes_what_the_server_refuses() -> None:
    sending = PublishedIdentity(partitions=(BARE_LEAF,))
    assert said(KEYED, sending, OURS)[0]
    assert said(KEYED, sending, THEIRS) == ("", "")
    assert (
        only_inserts(KEYED, THEIRS, sending)
        == "partition public.leaf has no usable replica identity"
    )
    for lost in (replace(DEFAULT_LEAF, unlogged=True), replace(DEFAULT_LEAF, foreign=True)):
        assert said(KEYED, PublishedIdentity(partitions=(lost,)), THEIRS)[0]
