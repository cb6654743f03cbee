"""Current rows for other libraries, as files, and in SQL."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import ingestd
from ingestd import cli
from ingestd.cli.commands.export import _new_file
from ingestd.config import TableSettings
from ingestd.lake.fold.raw_texts import RAW_TYPE
from ingestd.model.errors import ConfigError, OperatorError
from ingestd.model.schema import Column
from ingestd.reading.export import hidden_columns, write_rows
from ingestd.reading.frames import optional_library
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

if TYPE_CHECKING:
    from typer.testing import Result

AMOUNT = Column("amount", 1700, -1, pa.decimal128(4, 2), "numeric(4,2)")
ORDERS = make_table("orders", AMOUNT)
CUSTOMERS = make_table("Customers", oid=2)
CONFIG = """
[lake]
uri = "{lake}"
[sources.shop]
kind = "wal"
dsn = "postgresql://127.0.0.1/shop"
tables = ["public.*"]
mask_key = "sesame open"
[sources.shop.table."public.Customers"]
mask_columns = {{ note = "sha256" }}
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> RawLake:
    """Orders 1 and 2 in epoch 1, 3 in epoch 2, whose amount is no number; a customer."""
    raw = RawLake(tmp_path_factory.mktemp("filled"))
    place = {"_cdc_lsn": raw.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0}
    orders: list[dict[str, Any]] = [
        {"id": n, "note": "a", "amount": Decimal("1.50")} for n in (1, 2)
    ]
    customer = {"id": 1, "note": "secret"}
    raw.commit({ORDERS: [place | row for row in orders], CUSTOMERS: [place | customer]})
    raw.record("live", ORDERS, CUSTOMERS, snapshot_lsn=raw.lsn)
    row = {"id": 3, "note": "", "_cdc_raw": [("amount", "NaN")]}
    raw.commit({ORDERS: [{**row, "_cdc_lsn": raw.next_lsn(), "_cdc_seq": 1}]})
    return raw


@pytest.fixture
def lake(filled: RawLake, tmp_path: Path) -> Path:
    uri = filled.copied_to(tmp_path / "lake").uri
    (tmp_path / "ingestd.toml").write_text(CONFIG.format(lake=uri))
    return uri


def run(lake: Path, *words: str) -> Result:
    return CliRunner().invoke(cli.app, [*words, "-c", str(lake.parent / "ingestd.toml")])


def lines(lake: Path, *words: str) -> list[str]:
    done = run(lake, *words)
    assert done.exit_code == 0, done.output
    return sorted(done.stdout.splitlines())


def test_csv_tells_null_from_an_empty_text(lake: Path) -> None:
    assert lines(lake, "export", "shop", "public.orders") == [
        '"1","a","1.50"',
        '"2","a","1.50"',
        '"3","","NaN"',
        '"id","note","amount"',
    ]


def test_rows_are_exported_at_an_epoch_with_some_columns(lake: Path) -> None:
    words = ("export", "shop", "public.orders", "--format", "jsonl", "--at", "1", "--column", "id")
    assert lines(lake, *words) == ['{"id": 1}', '{"id": 2}']


def test_masked_columns_stay_masked(lake: Path) -> None:
    assert lines(lake, "export", "shop", "public.Customers")[0] == '"1","***"'
    found = lines(lake, "query", "shop", 'SELECT note FROM "Customers"', "--format", "jsonl")
    assert found == ['{"note": "***"}']


def test_parquet_keeps_the_types_and_no_file_is_replaced(lake: Path) -> None:
    path = lake.parent / "orders.parquet"
    words = ("export", "shop", "public.orders", "--format", "parquet", "-o", str(path))
    assert run(lake, *words).exit_code == 0
    found = pq.read_table(path).sort_by("id")
    assert found["amount"].to_pylist() == [Decimal("1.50"), Decimal("1.50"), None]
    assert found["_cdc_raw"].to_pylist()[-1] == [("amount", "NaN")]
    again = run(lake, *words)
    assert (again.exit_code, "exists; nothing was written" in again.output) == (2, True)


def test_an_export_that_fails_leaves_no_file(lake: Path) -> None:
    path = lake.parent / "none.csv"
    done = run(lake, "export", "shop", "public.none", "-o", str(path))
    assert done.exit_code == 2
    assert [p.name for p in lake.parent.iterdir() if "none" in p.name] == []


def test_an_export_that_was_killed_does_not_stop_the_next(lake: Path) -> None:
    path = lake.parent / "orders.csv"
    path.with_name(".orders.csv.partial").write_text("half")
    assert run(lake, "export", "shop", "public.orders", "-o", str(path)).exit_code == 0
    assert len(path.read_text().splitlines()) == 4
    assert sorted(p.name for p in lake.parent.glob(".*")) == [".orders.csv.partial"]


def test_a_file_that_appears_meanwhile_is_kept(lake: Path) -> None:
    path = lake.parent / "orders.csv"

    def write_both() -> None:
        with _new_file(path) as file:
            file.write(b"new")
            path.write_text("old")

    with pytest.raises(ConfigError, match="exists; nothing was written"):
        write_both()
    assert [p.read_text() for p in lake.parent.glob("*orders.csv*")] == ["old"]


def test_values_of_any_type_are_written_as_the_source_does() -> None:
    columns = {
        "a": pa.array([[1, None]], pa.list_(pa.int32())),
        "b": pa.array([b"\x01"]),
        "c": pa.array([float("nan")]),
        "d": pa.array([True]),
        "_cdc_raw": pa.array([[("a", "{{1}}")]], RAW_TYPE),
    }
    found = {}
    for form in ("csv", "jsonl"):
        output = io.BytesIO()
        assert write_rows(pa.table(columns).to_reader(), form, output) == 1
        found[form] = output.getvalue().decode().splitlines()
    assert found["csv"][1] == '"{{1}}","\\x01","NaN","t"'
    assert json.loads(found["jsonl"][0]) == {"a": "{{1}}", "b": "\\x01", "c": "NaN", "d": True}


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(
    "kind", [pa.int32(), pa.bool_(), pa.float32(), pa.float64(), pa.string(), pa.date32()], ids=str
)
def test_a_text_replaces_a_missing_value(form: str, kind: pa.DataType) -> None:
    columns = [pa.nulls(2, kind), pa.array([None, [("a", "odd")]], RAW_TYPE)]
    output = io.BytesIO()
    write_rows(pa.table(columns, names=["a", "_cdc_raw"]).to_reader(), form, output)
    *_, empty, found = output.getvalue().decode().splitlines()
    assert (empty, found) == {"csv": ("", '"odd"'), "jsonl": ('{"a": null}', '{"a": "odd"}')}[form]


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()], ids=str)
def test_floats_have_the_digits_of_the_source(kind: pa.DataType) -> None:
    values = pa.table([pa.array([0.1, -2.5, 1e30, 0.0], kind)], names=["a"])
    output = io.BytesIO()
    write_rows(values.to_reader(), "jsonl", output)
    found = [json.loads(line)["a"] for line in output.getvalue().splitlines()]
    assert found == [0.1, -2.5, 1e30, 0.0]


def test_a_column_is_masked_by_its_name_in_the_source() -> None:
    schema = pa.schema([(name, pa.string()) for name in ("ssn", "ssn__v2", "SSN__v3")])
    for excluded in ("ssn", "ssn__v2", "ssn__v3"):
        controls = TableSettings.model_validate({"exclude_columns": [excluded]})
        hidden = hidden_columns(schema, controls)
        assert {name.casefold() for name in hidden} == {excluded}


def test_all_tables_of_a_query_are_one_cut(lake: Path) -> None:
    pytest.importorskip("duckdb")
    join = "SELECT count(*) AS n FROM orders o JOIN public.customers c ON o.id >= c.id"
    assert lines(lake, "query", "shop", join, "--format", "jsonl") == ['{"n": 3}']
    assert lines(lake, "query", "shop", join, "--format", "jsonl", "--at", "1") == ['{"n": 2}']
    done = run(lake, "query", "shop", "SELECT nope FROM orders")
    assert done.exit_code == 1
    assert "public.orders" in done.output


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_late_fault_is_the_statement_s_and_leaves_no_file(lake: Path, form: str) -> None:
    pytest.importorskip("duckdb")
    late = "SELECT CASE WHEN n > 400000 THEN error('boom') END FROM range(500000) r(n)"
    path = lake.parent / "found"
    done = run(lake, "query", "shop", late, "--format", form, "-o", str(path))
    assert (done.exit_code, "boom" in done.output) == (1, True), done.output
    assert list(lake.parent.glob("*found*")) == []


def test_other_libraries_get_the_same_rows(lake: Path) -> None:
    table = ingestd.open_lake(str(lake)).source("shop").table("public.orders")
    pandas = pytest.importorskip("pandas")
    assert isinstance(table.to_pandas(), pandas.DataFrame)
    assert sorted(table.to_pandas()["id"]) == [1, 2, 3]
    pytest.importorskip("polars")
    assert sorted(table.to_polars(at=1)["id"]) == [1, 2]
    pytest.importorskip("duckdb")
    relation = table.to_duckdb(columns=["id", "amount"])
    assert relation.aggregate("sum(amount)").fetchall() == [(Decimal("3.00"),)]


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(OperatorError) as caught:
        optional_library("no_such_library", "a query", "ingestd[query]")
    assert caught.value.remedy == "pip install 'ingestd[query]'"
