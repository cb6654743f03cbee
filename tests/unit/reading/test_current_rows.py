"""Current rows at every cut, against the source that logged the changes and against the oracle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

import ingestd
from ingestd.lake.delta.read import read_raw
from ingestd.lake.layout import Layout
from ingestd.testing.oracle.comparison import read_registry
from ingestd.testing.oracle.folding import fold
from ingestd.testing.oracle.schema_history import SchemaHistory
from tests.harness.simulated_table import KEYED, KEYLESS, NAME, SOURCE, SimulatedTable, as_texts

if TYPE_CHECKING:
    from ingestd.model.schema import Table

SMALL_BYTES = 1 << 13
"""So little memory that rows are spilled."""
SEEDS = range(4)
PLACE = ["_cdc_op", "_cdc_lsn", "_cdc_seq"]
Step = Callable[[], Awaitable[None] | None]


async def write(path: Path, table: Table, choices: random.Random) -> SimulatedTable:
    """Write epochs of changes, with a new column and an incremental snapshot among them."""
    source = SimulatedTable(path, table, choices)
    await source.begin()
    steps: list[Step] = [*[source.change] * choices.randint(4, 12), source.add_column]
    choices.shuffle(steps)
    if table.key:
        chunks: list[Step] = [lambda: source.read_chunk("x"), lambda: source.read_chunk("y")]
        reread: list[Step] = [source.begin_reread, *chunks, source.end_reread]
        places = sorted(choices.randint(0, len(steps)) for _ in reread)
        for place, step in reversed(list(zip(places, reread, strict=True))):
            steps.insert(place, step)
    for step in steps:
        if step in {source.end_reread, source.add_column, source.begin_reread}:
            await source.commit_epoch()
        if (done := step()) is not None:
            await done
        if choices.random() < 0.5:
            await source.commit_epoch()
    await source.commit_epoch()
    await source.close()
    return source


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.thorough) for n in (2, 3))]
)
@pytest.mark.parametrize("table", [KEYED, KEYLESS], ids=["keyed", "keyless"])
def test_current_rows_are_the_source_at_each_epoch(table: Table, seed: int, tmp_path: Path) -> None:
    choices = random.Random(seed)
    source = asyncio.run(write(tmp_path / "lake", table, choices))
    spill = tmp_path / "spill"
    spill.mkdir()
    if seed % 2:
        DeltaTable(str(tmp_path / "lake" / Layout(SOURCE).raw(NAME))).optimize.compact()
    uri = str(tmp_path / "lake")
    read = ingestd.open_lake(uri).source(SOURCE).table(str(NAME))
    cache = str(tmp_path / "cache")
    cached = ingestd.open_lake(uri, cache=cache).source(SOURCE).table(str(NAME))
    raw = read_raw(uri, SOURCE, NAME)
    history = SchemaHistory.from_events(read_registry(uri, SOURCE), NAME)
    for epoch, expected in enumerate(source.cuts, 1):
        found = read.current(at=epoch)
        names = [n for n in found.schema.names if n != "_cdc_raw"]
        assert as_texts(found.to_pylist(), found.schema) == expected
        rows = raw.filter(pc.less_equal(raw["_cdc_epoch"], epoch))
        assert fold(rows, names, list(table.key), history).rows == expected
        spilled = read.current_batches(
            at=epoch, memory_bytes=choices.choice([1, SMALL_BYTES]), spill_folder=str(spill)
        ).read_all()
        assert as_texts(spilled.to_pylist(), found.schema) == expected
        _compare_projections(read, epoch, found, choices)
        if choices.random() < 0.7:
            kept = cached.current(at=epoch)
            assert as_texts(kept.to_pylist(), found.schema) == expected
            _compare_projections(cached, epoch, found, choices)
    assert list(spill.iterdir()) == []


def _compare_projections(read: Any, epoch: int, every: Any, choices: random.Random) -> None:
    """Compare chosen columns and conditions with the complete rows."""
    id_, note = pc.field("id"), pc.field("note")
    for where in (id_ == choices.randint(-1, 4), id_.isin([1, 2]) & (note == "n"), note.is_null()):
        columns = choices.sample([*every.schema.names], choices.randint(1, 3))
        found = read.current(at=epoch, columns=columns, where=where)
        assert found.schema.names == columns
        expected = every.filter(where).select(columns).to_pylist()
        assert _sorted(found.to_pylist(), columns) == _sorted(expected, columns)


def _sorted(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    for row in rows:
        if "_cdc_raw" in row:
            texts = [(n, t) for n, t in row["_cdc_raw"] or () if n in columns]
            row["_cdc_raw"] = texts or None
    return sorted(map(repr, rows))


@pytest.mark.parametrize("seed", SEEDS)
def test_changes_and_histories_are_those_of_the_source(seed: int, tmp_path: Path) -> None:
    source = asyncio.run(write(tmp_path, KEYED, random.Random(seed)))
    table = ingestd.open_lake(str(tmp_path)).source(SOURCE).table(str(NAME))
    places = [(v["_cdc_lsn"], v["_cdc_seq"]) for v in source.versions if v["_cdc_op"] != "r"]
    last = len(source.cuts)
    halves = [table.changes(0, last // 2), table.changes(last // 2)]
    found = pa.concat_tables([half.read_all().select(PLACE) for half in halves]).to_pylist()
    assert sorted((r["_cdc_lsn"], r["_cdc_seq"]) for r in found if r["_cdc_op"] != "r") == sorted(
        places
    )
    for key in {(row["id"], row["part"]) for row in source.rows}:
        versions = [v for v in source.versions if key in _keys(v) or v["_cdc_op"] == "t"]
        history = table.history(dict(zip(KEYED.key, key, strict=True)))
        names = [f.name for f in history.schema if not f.name.startswith("_cdc_")]
        assert history["_cdc_unchanged"].null_count == history.num_rows
        shown = [*PLACE, *(n for n in names if n != "extra")]
        found = [{n: row[n] for n in shown} for row in history.to_pylist()]
        expected = [{n: row.get(n) for n in shown} for row in versions]
        assert found == sorted(expected, key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"]))


def _keys(version: dict[str, Any]) -> set[tuple[Any, ...]]:
    rows = (version, version.get("_cdc_before") or {})
    return {tuple(row.get(name) for name in KEYED.key) for row in rows}
