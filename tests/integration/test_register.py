"""`ingestd register` against moto's Glue and a stand-in for Unity Catalog, both on loopback."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from ingestd.cli import app
from ingestd.model.schema import Column, Table, TableId
from tests.harness.config import wal_config
from tests.harness.raw_lake import RawLake
from tests.harness.unity_server import UnityServer
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120
TOKEN = "0123456789abcdef-token"
COLUMNS = (
    Column("id", 20, -1, pa.int64(), "bigint", identity=True, comment="the key"),
    Column("price", 1700, -1, pa.decimal128(12, 2), "numeric(12,2)"),
    Column("tags", 1009, -1, pa.list_(pa.string()), "text[]"),
)


def table(schema: str, name: str) -> Table:
    return Table(TableId(schema, name), 1, COLUMNS, "d", ("id",), ("id",))


ORDERS, SALES = table("public", "orders"), table("sales", "orders")


@pytest.fixture
def raw(tmp_path: Path) -> RawLake:
    made = RawLake(tmp_path / "a lake")
    lsn = made.next_lsn()
    rows = [{"_cdc_lsn": lsn, "_cdc_seq": 1, "id": 1, "tags": ["x"]}]
    made.commit({ORDERS: rows, SALES: rows})
    made.record("live", ORDERS, SALES)
    return made


@pytest.fixture
def glue(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # it keeps what an earlier server of the process had
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def unity() -> Iterator[UnityServer]:
    with UnityServer(TOKEN) as server:
        yield server


class Registering:
    """The command, with a config whose catalog has these settings."""

    def __init__(self, raw: RawLake, folder: Path, **catalog: str) -> None:
        self.raw = raw
        self.config = folder / "ingestd.toml"
        settings = "".join(f"{key} = {json.dumps(value)}\n" for key, value in catalog.items())
        self.config.write_text(
            f'[lake]\nuri = "{raw.uri}"\n[catalog]\n{settings}[sources.shop]\nkind = "wal"\n'
            'dsn = "postgresql://127.0.0.1/none"\ntables = ["*.*"]\n'
        )

    def run(self, *sources: str) -> tuple[int, list[str], str]:
        done = CliRunner().invoke(app, ["register", *sources, "--config", str(self.config)])
        return done.exit_code, done.stdout.splitlines(), done.stderr


def glue_tables(uri: str) -> dict[str, dict[str, Any]]:
    client = boto3.client("glue", region_name="eu-west-1", endpoint_url=uri)
    found = client.get_tables(DatabaseName="shop_raw")["TableList"]
    client.close()
    return {each["Name"]: each for each in found}


ALL = ["_epochs", "_tables", "orders", "sales__orders"]


def test_glue_has_every_table_once(raw: RawLake, glue: str, tmp_path: Path) -> None:
    registering = Registering(raw, tmp_path, kind="glue", uri=glue, region="eu-west-1")
    code, lines, _ = registering.run()
    assert (code, lines) == (0, [*(f"shop_raw.{n}: created" for n in ALL), "4 created"])
    assert registering.run() == (0, ["4 unchanged"], "")
    found = glue_tables(glue)["orders"]
    assert found["TableType"] == "EXTERNAL_TABLE"
    assert (
        found["Parameters"].items()
        >= {
            "spark.sql.sources.provider": "delta",
            "ingestd.source": "shop",
            "ingestd.table": "public.orders",
            "ingestd.key": '["id"]',
        }.items()
    )
    columns = {c["Name"]: c for c in found["StorageDescriptor"]["Columns"]}
    assert columns["id"] == {"Name": "id", "Type": "bigint", "Comment": "the key"}
    assert columns["price"]["Type"] == "decimal(12,2)"
    assert columns["tags"]["Type"] == "array<string>"
    assert columns["_cdc_before"]["Type"] == "struct<id:bigint>"
    # the location is that of the table: by path, in DuckDB
    path = found["StorageDescriptor"]["Location"].removeprefix("file://")
    reader = QueryBuilder().register("t", DeltaTable(path))
    rows = pa.table(reader.execute("SELECT id, tags FROM t").read_all())
    with duckdb.connect() as by_path:
        assert by_path.register("t", rows).sql("FROM t").fetchall() == [(1, ["x"])]


def test_glue_follows_a_new_column_and_a_dropped_table(
    raw: RawLake, glue: str, tmp_path: Path
) -> None:
    registering = Registering(raw, tmp_path, kind="glue", uri=glue, region="eu-west-1")
    registering.run()
    client = boto3.client("glue", region_name="eu-west-1", endpoint_url=glue)
    wider = Table(
        ORDERS.id,
        1,
        (*COLUMNS, Column("note", 25, -1, pa.string(), "text")),
        "d",
        ("id",),
        ("id",),
    )
    lsn = raw.next_lsn()
    raw.commit({wider: [{"_cdc_lsn": lsn, "_cdc_seq": 1, "id": 2, "note": "n"}]})
    raw.record("live", wider)
    raw.record("dropped", SALES)
    code, lines, printed = registering.run("shop")
    assert code == 0, printed
    assert lines[:2] == ["shop_raw.orders: updated", "shop_raw.sales__orders: removed"]
    assert set(glue_tables(glue)) == {"_epochs", "_tables", "orders"}
    names = [c["Name"] for c in glue_tables(glue)["orders"]["StorageDescriptor"]["Columns"]]
    assert "note" in names
    # a table of that name elsewhere is not ours
    other = {"Name": "sales__orders", "StorageDescriptor": {"Location": "s3://b/x"}}
    client.create_table(DatabaseName="shop_raw", TableInput=other)
    assert registering.run()[:2] == (0, ["3 unchanged"])
    assert "sales__orders" in glue_tables(glue)
    client.delete_table(DatabaseName="shop_raw", Name="orders")
    client.create_table(DatabaseName="shop_raw", TableInput=other | {"Name": "orders"})
    client.close()
    code, lines, printed = registering.run()
    assert (code, lines) == (1, ["1 failed, 2 unchanged"])
    assert "shop_raw.orders in the catalog is at s3://b/x, not at file://" in printed


def test_unity_has_every_table_once(raw: RawLake, unity: UnityServer, tmp_path: Path) -> None:
    registering = Registering(
        raw, tmp_path, kind="unity", uri=unity.uri, catalog="main", token=TOKEN
    )
    code, lines, _ = registering.run()
    assert (code, lines) == (0, [*(f"main.shop_raw.{n}: created" for n in ALL), "4 created"])
    assert registering.run() == (0, ["4 unchanged"], "")
    found = unity.tables["main.shop_raw.orders"]
    assert (found["table_type"], found["data_source_format"]) == ("EXTERNAL", "DELTA")
    assert found["storage_location"] == f"file://{raw.uri}/shop/public/orders"
    assert found["properties"]["ingestd.table"] == "public.orders"
    columns = {c["name"]: c for c in found["columns"]}
    assert (columns["id"]["type_name"], columns["id"]["comment"]) == ("LONG", "the key")
    price = columns["price"]
    assert (price["type_precision"], price["type_scale"]) == (12, 2)
    assert json.loads(columns["tags"]["type_json"])["type"]["elementType"] == "string"
    raw.record("dropped", SALES)
    assert registering.run() == (
        0,
        ["main.shop_raw.sales__orders: removed", *["1 removed, 3 unchanged"]],
        "",
    )
    unity.tables["main.shop_raw.orders"]["storage_location"] = "s3://other/place\x1b[2J\x9b31m\nok"
    code, lines, printed = registering.run()
    assert (code, lines) == (1, ["1 failed, 2 unchanged"])
    assert "is at s3://other/place [2J 31m ok, not at file://" in printed
    assert TOKEN not in printed


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (503, (75, "HTTP 503")),
        (429, (75, "HTTP 429")),
        (403, (1, "HTTP 403: it refuses")),
    ],
)
def test_a_refusal_of_unity_is_reported(
    raw: RawLake, unity: UnityServer, tmp_path: Path, status: int, expected: tuple[int, str]
) -> None:
    code, text = expected
    unity.refusals = [status]
    registering = Registering(
        raw, tmp_path, kind="unity", uri=unity.uri, catalog="main", token=TOKEN
    )
    exit_code, _, printed = registering.run()
    assert (exit_code, text in printed) == (code, True)
    assert registering.run()[0] == 0


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"token": "another-token-0123"}, (1, "HTTP 401: no token")),
        ({"catalog": "nowhere"}, (1, "the catalog nowhere does not exist")),
        ({"uri": "http://127.0.0.1:9/api/2.1/unity-catalog"}, (75, "ClientConnectorError")),
        *(
            ({"uri": uri}, (2, "catalog.uri: "))
            for uri in (
                "http://example.com/x",
                "http://localhost.example.com/x",
                "http://127.example.com/x",
                "http://localhost@example.com/x",
                "https://user@example.com/x",
            )
        ),
        ({"schema_name": "Shop"}, (2, "catalog.schema_name: has other characters")),
        ({"region": "x"}, (2, "catalog.region: has no effect with kind = 'unity'")),
        ({"kind": "hive"}, (2, "catalog.kind")),
    ],
)
def test_wrong_settings_of_unity_are_reported(
    raw: RawLake,
    unity: UnityServer,
    tmp_path: Path,
    wrong: dict[str, str],
    expected: tuple[int, str],
) -> None:
    code, text = expected
    settings = {"kind": "unity", "uri": unity.uri, "catalog": "main", "token": TOKEN}
    exit_code, _, printed = Registering(raw, tmp_path, **{**settings, **wrong}).run()
    assert text in printed
    assert exit_code == code
    assert not unity.tables


@pytest.mark.attack("lake writer")
def test_a_forged_record_of_one_table_concerns_its_name_only(
    raw: RawLake, unity: UnityServer, tmp_path: Path
) -> None:
    folder = str(raw.uri / "shop/_tables")
    recorded = DeltaTable(folder).to_pyarrow_table()
    [forged] = [row for row in recorded.to_pylist() if row["table"] == str(SALES.id)]
    forged["at"] += timedelta(seconds=1)
    forged["columns"][0]["delta_type"] = "bigint NOT NULL"
    write_deltalake(folder, pa.Table.from_pylist([forged], recorded.schema), mode="append")
    registering = Registering(
        raw, tmp_path, kind="unity", uri=unity.uri, catalog="main", token=TOKEN
    )
    code, lines, printed = registering.run()
    assert (code, lines[-1]) == (1, "3 created, 1 failed")
    assert "which is no type" in printed
    assert str(SALES.id) in printed


@contextmanager
def squatter(content: bytes, *, times: int = 1, encoding: str | None = None) -> Iterator[str]:
    """Listen where a catalog does not run, and answer everything with this, so often."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if encoding is not None:
                self.send_header("Content-Encoding", encoding)
            self.end_headers()
            with suppress(OSError):
                for _ in range(times):
                    self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/api/2.1/unity-catalog"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.attack("account")
@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_an_answer_without_end_is_not_kept(
    raw: RawLake, tmp_path: Path, encoding: str | None
) -> None:
    """A program in the place of a catalog on this machine could end the process."""
    piece = bytes(1 << 20)
    content = gzip.compress(piece * 200) if encoding else piece
    with squatter(content, times=1 if encoding else 1 << 20, encoding=encoding) as uri:
        code, _, printed = Registering(raw, tmp_path, kind="unity", uri=uri, catalog="main").run()
    assert (code, "ClientPayloadError" in printed) == (75, True), printed


ANSWERS = {
    "deep": b"[" * 100_000,
    "another type": b'{"properties": "secret"}',
    "no text": b"\xff",
    "no JSON": b"<html>secret</html>",
    "a list": b'["secret"]',
}


@pytest.mark.attack("account")
@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_of_another_form_is_an_error(raw: RawLake, tmp_path: Path, kind: str) -> None:
    with squatter(ANSWERS[kind]) as uri:
        code, _, printed = Registering(raw, tmp_path, kind="unity", uri=uri, catalog="main").run()
    assert (code, "an answer that is none of its API's" in printed) == (1, True), printed
    assert "secret" not in printed


def test_no_proxy_is_asked_for_a_catalog_on_this_machine(
    raw: RawLake, unity: UnityServer, glue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would see the token, and know another machine by that address."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    settings = {"kind": "unity", "uri": unity.uri, "catalog": "main", "token": TOKEN}
    assert Registering(raw, tmp_path, **settings).run()[0] == 0
    registering = Registering(raw, tmp_path, kind="glue", uri=glue, region="eu-west-1")
    assert registering.run()[0] == 0


HANGS = """
import asyncio, socket, threading
from ingestd.catalogs.unity import UnitySchema
from ingestd.config import CatalogSettings
from ingestd.process.daemon_thread import in_daemon_thread
asked = threading.Event()
def hang(*_, **__):
    asked.set()
    threading.Event().wait()
socket.getaddrinfo = hang
settings = CatalogSettings(kind="unity", uri="https://catalog.example.com/x", catalog="main")
async def main():
    schema = UnitySchema(settings, "shop_raw")
    naming = asyncio.create_task(in_daemon_thread(lambda: schema.location_of("t"), "catalog"))
    await asyncio.to_thread(asked.wait)
    naming.cancel()
    await asyncio.gather(naming, return_exceptions=True)
asyncio.run(main())
print("ended")
"""


def test_a_name_that_does_not_resolve_delays_no_stop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ended\n"


def test_glue_out_of_reach_is_reported(
    raw: RawLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    settings = {"kind": "glue", "region": "eu-west-1", "uri": "http://127.0.0.1:9"}
    code, _, printed = Registering(raw, tmp_path, **settings).run()
    assert (code, "NoCredentialsError" in printed) == (1, True)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    code, _, printed = Registering(raw, tmp_path, **settings).run()
    assert (code, "EndpointConnectionError" in printed) == (75, True)


def test_without_a_section_the_command_says_what_to_write(raw: RawLake, tmp_path: Path) -> None:
    registering = Registering(raw, tmp_path, kind="glue")
    text = registering.config.read_text().replace('[catalog]\nkind = "glue"\n', "")
    registering.config.write_text(text)
    code, _, printed = registering.run()
    assert code == 2
    assert "the config has no [catalog] section" in printed


def test_the_daemon_names_tables_and_waits_for_no_catalog(
    database: Database, lake: Path, make_daemon: MakeDaemon, unity: UnityServer
) -> None:
    """The catalog refuses first: epochs are committed all the same; later names follow tables."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    settings = {"kind": "unity", "uri": unity.uri, "catalog": "main", "token": TOKEN}
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    catalog = "\n".join(["[catalog]", *lines])
    unity.refusals = [503]
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, extra=catalog))
    with daemon:
        await_until(lambda: daemon.events("catalog.failed"), LIMIT_S, daemon.tail)
        assert "HTTP 503" in daemon.events("catalog.failed")[0]["reason"]
        await_until(lambda: daemon.events("epoch.committed"), LIMIT_S, daemon.tail)
        database.execute("CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
        names = {f"main.shop_raw.{name}" for name in ("_epochs", "_tables", "t", "u")}
        await_until(lambda: set(unity.tables) == names, LIMIT_S, daemon.tail)
        checked = CliRunner().invoke(app, ["check", "--json", "--config", str(daemon.config_path)])
        found = [x for x in json.loads(checked.stdout)["checks"] if "catalog" in x["subject"]]
        assert [line["level"] for line in found] == ["ok"], found
    assert TOKEN not in daemon.log_path.read_text("utf-8")
