"""Rows of a table without a key counted by arrays, against the fold that goes row by row."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.digests.value_hashes import row_hashes
from ingestd.lake.delta.read import conform
from ingestd.lake.fold.plain import fold
from ingestd.lake.reference.definition import ReferenceColumn, ReferenceDefinition
from ingestd.lake.reference.keyless_rows import KeylessRows
from ingestd.lake.reference.raw_changes import change_rows_schema
from ingestd.model.changes import change_schema
from ingestd.model.errors import TableError
from tests.harness.examples import examples
from tests.unit.lake.reference.test_last_rows import TABLE, table

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = ["a", "b", "note", "tags"]
KEYLESS = replace(
    TABLE,
    columns=tuple(replace(c, identity=False) for c in TABLE.columns),
    replica_identity="f",
    key=(),
    before=tuple(NAMES),
)
SCHEMA = change_schema(KEYLESS)
DEFINITION = ReferenceDefinition(
    KEYLESS.id,
    is_live=True,
    columns=tuple(
        ReferenceColumn(c.name, c.name, c.type, c.name, None, 0) for c in KEYLESS.columns
    ),
    key=(),
    key_since_lsn=0,
)
COLLIDES = 4830585175390708007
ROWS = st.fixed_dictionaries(
    {
        "a": st.sampled_from([None, 1, 2]),
        "b": st.sampled_from(["x", ""]),
        "note": st.sampled_from([None, "n"]),
        "tags": st.sampled_from([None, [], ["t", None]]),
    }
)


@st.composite
def logs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What a server logs of a table with REPLICA IDENTITY FULL."""
    rows: list[dict[str, Any]] = []
    log: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 25))):
        place = {"_cdc_lsn": number // 3, "_cdc_seq": number % 3 + 1}
        action = draw(st.sampled_from("rcud")) if rows else "c"
        if action in "rc":
            rows.append(draw(ROWS))
            log.append({**rows[-1], **place, "_cdc_op": action})
            continue
        old = rows.pop(draw(st.integers(0, len(rows) - 1)))
        before = draw(st.booleans()) or action == "u"
        said = {"_cdc_before": old if before else None, "_cdc_op": action, **place}
        if action == "d":
            log.append({**old, **said})
            continue
        unchanged = draw(st.sets(st.sampled_from(["b", "note", "tags"])))
        rows.append({**draw(ROWS), **{n: old[n] for n in unchanged}})
        sent = {n: None if n in unchanged else v for n, v in rows[-1].items()}
        log.append({**sent, **said, "_cdc_unchanged": sorted(unchanged) or None})
    return log


def counted(rows: Sequence[dict[str, Any]]) -> Counter[str]:
    return Counter(repr([row[n] for n in NAMES]) for row in rows)


def left(log: Sequence[dict[str, Any]], shares: int, pieces: int = 1) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    schema = change_rows_schema(DEFINITION, NAMES)
    for share in range(shares):
        whole = KeylessRows(DEFINITION, share, shares)
        for piece in range(pieces):
            whole.add_changes(conform(table(log[piece::pieces], SCHEMA), schema))
        found += whole.rows().to_pylist()
    return found


@pytest.mark.slow
@examples(150)
@given(logs(), st.integers(1, 3), st.integers(1, 3))
def test_equals_the_plain_fold(log: list[dict[str, Any]], shares: int, pieces: int) -> None:
    assert counted(left(log, shares, pieces)) == counted(fold(table(log, SCHEMA), ()))


def test_a_value_outside_its_column_is_refused_while_it_exists() -> None:
    odd = {"b": "x", "_cdc_raw": [("a", "1e99")], "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 1}
    gone = {
        "_cdc_before": {"b": "x"},
        "_cdc_raw": [("_cdc_before.a", "1e99")],
        "_cdc_op": "d",
        "_cdc_lsn": 2,
        "_cdc_seq": 1,
    }
    twin = {"b": "x", "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 2}
    with pytest.raises(TableError, match="column 'a'"):
        left([odd, twin], 1)
    assert left([odd, gone, twin], 1) == [{"a": None, "b": "x", "note": None, "tags": None}]
    with pytest.raises(TableError, match="column 'a'"):
        left([odd, twin, {**gone, "_cdc_raw": None}], 1)


@pytest.mark.parametrize("name", ["b", "tags"])
def test_an_unchanged_value_is_refused_while_its_row_exists(name: str) -> None:
    """The old row's text, which its column can't hold, is the new row's."""
    old, new = {f"_cdc_before.{name}": "odd"}.items(), {name: "odd"}.items()
    log: list[dict[str, Any]] = [
        {"a": 1, "_cdc_raw": list(new), "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 1},
        {"a": 2, "_cdc_raw": list(old), "_cdc_before": {"a": 1}, "_cdc_op": "u"},
        {"_cdc_raw": list(old), "_cdc_before": {"a": 2}, "_cdc_op": "d"},
    ]
    log[1] |= {"_cdc_unchanged": [name], "_cdc_lsn": 2, "_cdc_seq": 1}
    log[2] |= {"_cdc_lsn": 3, "_cdc_seq": 1}
    for shares in (1, 3):
        for seen in (1, 2):
            with pytest.raises(TableError, match=f"column '{name}'"):
                left(log[:seen], shares)
        assert not left(log, shares)
    [row] = fold(table(log[:2], SCHEMA), ())
    assert row[name] == "odd"


def test_rows_with_an_intentional_hash_collision_are_kept_apart() -> None:
    """value_hashes is injective on integers, so a row with another's hash can be computed."""
    columns = KEYLESS.columns[:2]
    two = replace(
        KEYLESS,
        columns=tuple(replace(c, type=pa.int64()) for c in columns),
        before=("a", "b"),
    )
    definition = replace(
        DEFINITION,
        columns=tuple(
            ReferenceColumn(c.name, c.name, c.type, c.name, None, 0) for c in two.columns
        ),
    )
    one, other = {"a": 1, "b": 100}, {"a": 2, "b": COLLIDES}
    hashes = row_hashes([pa.array([1, 2]), pa.array([100, COLLIDES])], 2)
    assert hashes[0] == hashes[1]
    log = [
        {**one, "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 1},
        {**other, "_cdc_op": "c", "_cdc_lsn": 1, "_cdc_seq": 2},
        {**one, "_cdc_op": "d", "_cdc_before": one, "_cdc_lsn": 2, "_cdc_seq": 1},
    ]
    whole = KeylessRows(definition, 0, 1)
    schema = change_rows_schema(definition, ["a", "b"])
    whole.add_changes(conform(table(log, change_schema(two)), schema))
    assert whole.rows().to_pylist() == [other]


def test_it_is_arrow_of_the_tables_types() -> None:
    whole = KeylessRows(DEFINITION, 0, 1)
    whole.add_changes(change_rows_schema(DEFINITION, NAMES).empty_table())
    assert whole.rows().schema.types == [c.type for c in KEYLESS.columns]
    assert isinstance(whole.rows(), pa.Table)
