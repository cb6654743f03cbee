"""Neither values of rows nor secrets are in a log or an answer, whatever goes wrong."""

from __future__ import annotations

import base64
import http.client
import json
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import psutil
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from ingestd.cli import app as command_line
from ingestd.http.client import Endpoint, fetch_status, request_snapshot
from ingestd.http.command_token import read_token
from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.compare import raw_rows, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

CANARY = "Kanarienvogel"
FORMS = (
    CANARY.lower(),
    CANARY.encode().hex(),
    base64.b64encode(CANARY.encode()).decode().rstrip("=").lower()[:-1],
)
LIMIT_S = 40.0
BIRDS, OTHERS = TableId("public", "birds"), TableId("public", "others")


def assert_untold(text: str, where: str) -> None:
    found = [form for form in FORMS if form in text.lower()]
    assert not found, f"{where}: {text[max(0, text.lower().index(found[0]) - 500) :][:1000]}"


def answers(daemon: Daemon) -> Iterator[tuple[str, str]]:
    """Everything that it sends over HTTP: pages, and responses to valid and invalid commands."""
    for path in ("/status", "/metrics", "/readyz", "/healthz", "/nowhere"):
        answer = daemon.get(path)
        assert answer is not None
        yield path, answer[1]
    commands = (daemon.status() or {})["commands"]
    token = read_token(commands, daemon.listen.port)
    bodies: list[Any] = [{"tables": ["public.birds"]}, {"tables": ["public.none"]}, {"tables": 1}]
    for body in bodies:
        connection = http.client.HTTPConnection(daemon.listen.host, daemon.listen.port, timeout=10)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request("DELETE", "/sources/shop/snapshot", json.dumps(body), headers)
        yield f"DELETE {body}", connection.getresponse().read().decode()
        connection.close()


def debugging(daemon: Daemon) -> Daemon:
    """Have it log all that it can."""
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[log]\n", '[log]\nlevel = "debug"\n'))
    return daemon


def with_birds(database: Database) -> None:
    """A table with the canary in keys, values, comments and defaults."""
    database.execute(
        f"""CREATE TABLE birds (id text PRIMARY KEY, note text, amount text, email text,
                                kept jsonb DEFAULT '{{"a": "{CANARY}"}}', CHECK (id <> note))""",
        f"COMMENT ON TABLE birds IS 'of {CANARY}'",
        f"COMMENT ON COLUMN birds.note IS 'of {CANARY}'",
        f"""INSERT INTO birds SELECT '{CANARY} ' || i, repeat('{CANARY}', 20), '{CANARY}',
                                     '{CANARY}@example.org' FROM generate_series(1, 2000) i""",
        "CREATE TABLE others (id text PRIMARY KEY, note text)",
        f"INSERT INTO others VALUES ('{CANARY}', '{CANARY}')",
    )


def has_failed(daemon: Daemon, count: int) -> bool:
    return len(daemon.events("snapshot.failed")) == count


def is_seen(lake: Path, key: str) -> bool:
    """Whether a row is in the lake, which is where values are to be."""
    return any(row["id"] == key for row in raw_rows(lake, BIRDS))


@pytest.mark.thorough
def test_no_value_of_a_row_is_leaked(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    with_birds(database)
    extra = """
[sources.shop.table."public.birds"]
types = { amount = "integer" }
mask_columns = { email = "sha256" }
[sources.shop.table."public.others"]
reference = "snapshot_plus_cdc"
"""
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        source_extra='snapshot_chunked_above = "0"\nsnapshot_chunk = "64kB"\n'
        f'discover_interval = "200ms"\nmask_key = "k-{CANARY}"',
        extra=extra,
    )
    daemon = debugging(make_daemon(config))
    daemon.start_ready(LIMIT_S)
    database.execute(
        f"UPDATE birds SET id = 'new {CANARY} ' || id, note = '{CANARY}' WHERE id LIKE '%9'",
        f"DELETE FROM birds WHERE id = '{CANARY} 1'",
        f"ALTER TABLE birds ADD COLUMN added text DEFAULT '{CANARY}'",
        f"COMMENT ON COLUMN birds.added IS '{CANARY}'",
        f"INSERT INTO birds (id, note) VALUES ('last {CANARY}', 'x')",
        # what follows can't be captured, and stops the table
        "ALTER TABLE others REPLICA IDENTITY NOTHING",
        f"CREATE TABLE keyless (note text DEFAULT '{CANARY}')",
        f"INSERT INTO keyless VALUES ('{CANARY}')",
    )
    await_until(lambda: is_seen(lake, f"last {CANARY}"), LIMIT_S, daemon.tail)
    # the server says which value it can't cast
    request_snapshot(daemon.listen, "shop", ["public.birds"], "note::int > 0")
    await_until(lambda: bool(daemon.events("snapshot.failed")), LIMIT_S, daemon.tail)
    [failed] = daemon.events("snapshot.failed")
    assert failed["reason"].startswith("InvalidTextRepresentation, SQLSTATE 22P02")
    # and for a name that does not exist, any value
    for count, cast in enumerate(("regclass", "regrole", "regtype", "regnamespace"), start=2):
        request_snapshot(daemon.listen, "shop", ["public.birds"], f"note::{cast} IS NULL")
        await_until(partial(has_failed, daemon, count), LIMIT_S, daemon.tail)
        assert ", SQLSTATE " in daemon.events("snapshot.failed")[-1]["reason"]
    database.execute("ALTER TABLE birds ALTER COLUMN note TYPE varchar(900)")  # re-read
    for where, text in answers(daemon):
        assert_untold(text, where)
    shown = CliRunner().invoke(command_line, ["status", "-c", str(daemon.config_path)])
    assert shown.exit_code == 0
    assert_untold(shown.output, "ingestd status")
    daemon.sigkill()
    daemon.start()
    database.execute(f"INSERT INTO birds (id, note) VALUES ('again {CANARY}', 'x')")
    await_until(lambda: is_seen(lake, f"again {CANARY}"), LIMIT_S, daemon.tail)
    assert_untold(json.dumps(daemon.status()), "/status")
    daemon.sigterm()
    assert_untold(daemon.log_path.read_text(), "the log")
    # it is where it should be
    raw = read_raw(str(lake), "shop", BIRDS)
    assert CANARY in str(raw["_cdc_raw"].to_pylist())
    assert any(CANARY in str(row["columns"]) for row in registry(lake))
    assert CANARY not in str(raw["email"].to_pylist())


def test_polling_tells_no_value_of_a_row(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    with_birds(database)
    section = '[sources.shop.table."public.birds"]\ndetect_deletes = "100ms"\n'
    section += 'types = { amount = "integer" }\n'
    daemon = debugging(make_daemon(polling_config(lake=lake, dsn=database.dsn, extra=section)))
    daemon.start()
    await_until(lambda: is_seen(lake, f"{CANARY} 7"), LIMIT_S, daemon.tail)
    database.execute(
        f"UPDATE birds SET note = note || '{CANARY}' WHERE id LIKE '%9'",
        f"DELETE FROM birds WHERE id = '{CANARY} 1'",
        f"INSERT INTO birds (id, note) VALUES ('last {CANARY}', 'zzz {CANARY}')",
    )
    await_until(lambda: is_seen(lake, f"last {CANARY}"), LIMIT_S, daemon.tail)
    for where, text in answers(daemon):
        assert_untold(text, where)
    daemon.sigterm()
    assert_untold(daemon.log_path.read_text(), "the log")


# --- secrets ---------------------------------------------------------------------------------

PASSWORD = "s3cret/ of:a@kind's"
MASK_KEY = "mask-key-canary-1"
TOKEN = "http-token-canary-0123"
STORE_KEY = "store/key+canary/1=="


def test_no_secret_is_leaked(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    """Of a source that can't be reached, one with a wrong password, one that works; by HTTP too."""
    user, password = f"p_{database.name}", sql.Literal(PASSWORD).as_string(None)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"CREATE ROLE {user} SUPERUSER LOGIN PASSWORD {password}",
    )
    uri = f"postgresql://u:{quote(PASSWORD, safe='')}@127.0.0.1:1/d"
    config = wal_config(
        lake=lake,
        dsn=make_conninfo(database.dsn, user=user, password=PASSWORD, sslpassword=PASSWORD),
        source_extra='mask_key = "env:KEY"',
    )
    config = config.replace(
        "[epoch]", f'[lake.storage_options]\nAWS_SECRET_ACCESS_KEY = "{STORE_KEY}"\n\n[epoch]'
    )
    away = wal_config(lake=lake, dsn=uri, source="away")
    config += away[away.index("[sources.away]") :]
    daemon = debugging(make_daemon(config, environment={"KEY": MASK_KEY, "PGPASSWORD": PASSWORD}))
    text = daemon.config_path.read_text()
    daemon.config_path.write_text(text.replace("[http]\n", f'[http]\ntoken = "{TOKEN}"\n'))
    daemon.start()
    there = Endpoint(daemon.listen.host, daemon.listen.port, TOKEN)

    def states() -> dict[str, str]:
        status = fetch_status(there) if daemon.events("http.listening") else None
        return {} if status is None else {n: s["state"] for n, s in status["sources"].items()}

    await_until(lambda: states().get("shop") == "streaming", LIMIT_S, daemon.tail)
    await_until(
        lambda: any(e.get("source") == "away" for e in daemon.events("source.failed")),
        LIMIT_S,
        daemon.tail,
    )
    refused = daemon.get("/status")
    assert refused is not None
    assert refused[0] == 401
    shown = CliRunner().invoke(
        command_line, ["status", "--json", "-c", str(daemon.config_path)], env={"KEY": MASK_KEY}
    )
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["sources"].keys() == {"shop", "away"}
    checked = CliRunner().invoke(
        command_line, ["check", "-c", str(daemon.config_path)], env={"KEY": MASK_KEY}
    )
    told = json.dumps(fetch_status(there)) + refused[1] + shown.output + checked.output
    process = psutil.Process(daemon.pid)  # command lines are for every account to see
    told += str([p.cmdline() for p in (process, *process.children(recursive=True))])
    daemon.sigterm()
    told += daemon.log_path.read_text()
    for secret in (PASSWORD, quote(PASSWORD, safe=""), MASK_KEY, TOKEN, STORE_KEY):
        assert secret not in told
        assert json.dumps(secret)[1:-1] not in told
