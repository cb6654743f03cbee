"""SQL by DuckDB: only the tables that a statement names, complete or not at all."""

from __future__ import annotations

import gc
import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import ingestd
from ingestd.lake.layout import Layout
from ingestd.model.errors import ConfigError, OperatorError, TransientError
from ingestd.reading.export import write_rows
from ingestd.reading.query import run_query
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.model.schema import TableId
    from ingestd.reading.lake import LakeSource

pytest.importorskip("duckdb")
NAMES = ("orders", "Orders", "items", "Lines")
TABLES = [make_table(name, oid=number) for number, name in enumerate(NAMES, 1)]


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> RawLake:
    """Four tables; two of them are one name in DuckDB. The others have the rows 1 to 3."""
    raw = RawLake(tmp_path_factory.mktemp("read") / "lake")
    place = {"_cdc_lsn": raw.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0, "note": "a"}
    raw.commit({table: [{**place, "id": n} for n in (1, 2, 3)] for table in TABLES})
    raw.record("live", *TABLES, snapshot_lsn=raw.lsn)
    return raw


@pytest.fixture(scope="module")
def source(lake: RawLake) -> LakeSource:
    return ingestd.open_lake(str(lake.uri)).source("shop")


SAME_TABLE = ("items", "public.items", "memory.public.items", '"memory"."PUBLIC"."Items"', "Lines")
READS = (
    "SELECT count(*) FROM {}",
    "SELECT count(*) FROM {} a JOIN {} b USING (id)",
    "WITH orders AS (FROM {}) SELECT count(*) FROM orders",
    "PIVOT (SELECT note FROM {}) ON note USING count(*)",
    "SELECT sum(a) FROM (PIVOT {} ON note USING count(id))",
    "SELECT (SELECT count(*) FROM {})",
    "SELECT count(*) FROM (DESCRIBE {}) d, {} WHERE column_name = 'id'",
)
BY_TEXT = "SELECT count(*) FROM query_table('{}')"


@pytest.mark.parametrize(
    ("name", "read"),
    [*itertools.product(SAME_TABLE, READS), ("items", BY_TEXT), ("Lines", BY_TEXT)],
)
def test_a_named_table_is_never_empty(source: LakeSource, name: str, read: str) -> None:
    found = run_query(source, read.format(name, name)).read_all()
    assert found.column(0).to_pylist() == [3]


@pytest.mark.parametrize("name", ["orders", 'public."Orders"', "memory.public.ORDERS"])
def test_a_name_of_two_tables_is_refused(source: LakeSource, name: str) -> None:
    with pytest.raises(ConfigError, match=r"public\.Orders and public\.orders are one name"):
        run_query(source, f"SELECT * FROM {name}")


@pytest.mark.parametrize("name", ["nowhere", "memory.nowhere.items", "other.items"])
def test_other_names_are_no_tables(source: LakeSource, name: str) -> None:
    with pytest.raises(OperatorError, match="does not exist") as caught:
        run_query(source, f"SELECT * FROM {name}")
    assert "public.items" in str(caught.value.remedy)


OUTSIDE = {
    "a file of the lake": "FROM read_parquet('{raw}/*.parquet')",
    "a file by its name": "FROM '{raw}/x.parquet'",
    "names of files": "FROM glob('{raw}/*')",
    "text": "FROM read_text('{raw}/_delta_log/*')",
    "an exported file": "COPY items TO '{made}'",
    "a database": "ATTACH '{made}'",
    "an extension": "INSTALL httpfs",
    "a loaded extension": "LOAD httpfs",
    "a setting": "SET threads = 1",
    "a variable of Python": "FROM items, rows",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_statement_sees_only_its_tables(lake: RawLake, source: LakeSource, name: str) -> None:
    raw, made = lake.uri / Layout("shop").raw(TABLES[2].id), lake.uri.parent / "made"
    with pytest.raises(OperatorError):
        run_query(source, OUTSIDE[name].format(raw=raw, made=made)).read_all()
    assert not made.exists()


def test_no_table_is_read_for_a_wrong_statement(source: LakeSource) -> None:
    read: list[str] = []

    def prepare(table: TableId, rows: pa.RecordBatchReader) -> pa.RecordBatchReader:
        read.append(str(table))
        return rows

    with pytest.raises(OperatorError, match="syntax error"):
        run_query(source, "SELEC * FROM items", prepare=prepare)
    assert read == []
    assert run_query(source, "", prepare=prepare).schema.names == []
    run_query(source, "FROM items lines", prepare=prepare)
    assert read == ["public.items"]


def test_a_fault_of_the_lake_keeps_its_kind(source: LakeSource) -> None:
    def broken(_: object, rows: pa.RecordBatchReader) -> pa.RecordBatchReader:
        def batches() -> Iterator[pa.RecordBatch]:
            yield from rows
            raise TransientError("the store does not answer", reason="store")

        return pa.RecordBatchReader.from_batches(rows.schema, batches())

    with pytest.raises(TransientError, match="the store does not answer"):
        run_query(source, "FROM items", prepare=broken)


def test_a_fault_in_later_rows_is_the_statement_s(source: LakeSource) -> None:
    late = "SELECT CASE WHEN n > 400000 THEN error('boom') END FROM items, range(500000) r(n)"
    reader = run_query(source, late)
    with pytest.raises(OperatorError, match="boom") as caught:
        reader.read_all()
    assert "correct the statement" in str(caught.value.remedy)


@pytest.mark.attack("account")
def test_rows_are_spilled_to_a_folder_of_this_user(
    lake: RawLake, source: LakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another account could read them in `.tmp` of a shared working directory, or put a link."""
    monkeypatch.chdir(lake.uri.parent)
    others = lake.uri.parent / "others"
    others.mkdir()
    (lake.uri.parent / ".tmp").symlink_to(others)
    large = "SELECT i, i::text AS t, (i * 7)::text AS u FROM range(3000000) s(i) ORDER BY u"
    statement = f"SELECT current_setting('temp_directory') AS f, * FROM ({large})"
    reader = run_query(source, statement, memory_bytes=40_000_000)
    folder = Path(next(reader)["f"][0].as_py())
    assert list(folder.iterdir())
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(others.iterdir())
    del reader
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_refuted_columns_of_one_name_are_refused(source: LakeSource, form: str) -> None:
    rows = run_query(source, 'SELECT * FROM items a, "Lines" b')
    with pytest.raises(ConfigError, match="two columns are named 'id'"):
        write_rows(rows, form, io.BytesIO())
