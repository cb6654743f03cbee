"""Connections to a server elsewhere: encrypted, to the right one, or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from ingestd.app import check as checking
from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.polling.server import detect_transaction_pooler
from tests.harness.certificates import Authority
from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import polling_config, wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.tls_servers import NAME, PASSWORD
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.tls_servers import TlsServer

LIMIT_S = 40.0


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No TLS modes or certificates of the user who runs the tests."""
    for name in ("PGSSLMODE", "PGSSLROOTCERT", "PGSSLCERT", "PGSSLKEY", "PGREQUIRESSL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def failure(dsn: str, **options: Any) -> OperatorError:
    with pytest.raises(psycopg.Error) as caught:
        await connect(dsn, **options)
    error = classify(caught.value, "source shop, connect", dsn)
    assert isinstance(error, OperatorError)
    assert PASSWORD not in str(error)
    return error


async def is_encrypted(dsn: str, **options: Any) -> bool:
    async with await connect(dsn, **options) as connection:
        return bool(connection.pgconn.ssl_in_use)


@pytest.mark.parametrize("replication", [False, True])
async def test_the_right_server_is_connected_to(secure: TlsServer, *, replication: bool) -> None:
    assert await is_encrypted(secure.dsn(), replication=replication)
    assert await is_encrypted(secure.dsn(sslmode="verify-full"), replication=replication)
    await detect_transaction_pooler(secure.dsn())


@pytest.mark.parametrize("replication", [False, True])
async def test_another_name_is_refused_in_three_lines(
    secure: TlsServer, *, replication: bool
) -> None:
    error = await failure(secure.dsn(host="other.example"), replication=replication)
    what, remedy, other = str(error).splitlines()
    assert 'certificate for "db.example" does not match host name "other.example"' in what
    assert "host other.example" in what
    assert "host=NAME in `dsn`" in remedy
    assert "set a weaker sslmode explicitly" in other
    with pytest.raises(psycopg.OperationalError, match="does not match host name"):
        await detect_transaction_pooler(secure.dsn(host="other.example"))


async def test_an_address_is_no_name(secure: TlsServer) -> None:
    error = await failure(secure.dsn(host="", sslmode="verify-full"))
    assert "host=NAME in `dsn`" in (error.remedy or "")


async def test_a_certificate_of_another_authority_is_refused(
    secure: TlsServer, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    for roots in (str(stranger.cert), ""):  # and of none that the system knows
        error = await failure(secure.dsn(sslrootcert=roots))
        what, remedy, _ = str(error).splitlines()
        assert "certificate verify failed" in what
        assert "sslrootcert=FILE in `dsn`" in remedy
    missing = await failure(secure.dsn(sslrootcert=str(tmp_path / "none.pem")))
    assert "does not exist" in missing.what
    assert "sslrootcert=FILE" in (missing.remedy or "")


async def test_a_server_without_tls_is_refused(database: Database) -> None:
    dsn = make_conninfo(database.dsn, host=NAME, hostaddr="127.0.0.1")
    what, remedy, other = str(await failure(dsn)).splitlines()
    assert "server does not support SSL" in what
    assert "ALTER SYSTEM SET ssl = on" in remedy
    assert "set a weaker sslmode explicitly" in other


async def test_a_weaker_mode_is_taken_where_it_is_written_out(
    secure: TlsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await is_encrypted(secure.dsn(host="other.example", sslmode="require", sslrootcert=""))
    assert await is_encrypted(secure.dsn(host="other.example", sslmode="verify-ca"))
    assert not await is_encrypted(secure.dsn(sslmode="disable"))
    monkeypatch.setenv("PGSSLMODE", "disable")
    assert not await is_encrypted(secure.dsn())


async def test_a_password_is_bound_to_the_channel(secure: TlsServer) -> None:
    scram = {"user": "scram", "password": PASSWORD, "require_auth": "scram-sha-256"}
    dsn = secure.dsn(**scram, channel_binding="require")
    for replication in (False, True):
        assert await is_encrypted(dsn, replication=replication)
    error = await failure(secure.dsn(**scram, channel_binding="require", sslmode="disable"))
    assert "channel binding" in error.what
    error = await failure(secure.dsn(**{**scram, "password": "wrong"}))
    assert "ALTER ROLE" in (error.remedy or "")


async def test_certificates_of_clients(secure: TlsServer, tmp_path: Path) -> None:
    own = secure.authority.sign("certified")

    def dsn(cert: object, key: object, user: str = "certified") -> str:
        return secure.dsn(user=user, sslcert=str(cert), sslkey=str(key))

    for replication in (False, True):
        assert await is_encrypted(dsn(own.cert, own.key), replication=replication)
    stranger = Authority(tmp_path, "stranger").sign("certified")
    other = secure.authority.sign("somebody")
    open_key = tmp_path / "open.key"
    open_key.write_bytes(own.key.read_bytes())
    open_key.chmod(0o644)
    for wrong in (
        secure.dsn(user="certified"),
        dsn(stranger.cert, stranger.key),
        dsn(other.cert, other.key),
        dsn(own.cert, open_key),
        dsn(own.cert, tmp_path / "none.key"),
    ):
        error = await failure(wrong)
        assert "sslcert=FILE and sslkey=FILE" in (error.remedy or ""), str(error)


# --- a daemon --------------------------------------------------------------------------------


@pytest.fixture
def shop(secure: TlsServer) -> Iterator[Database]:
    with fresh_database(secure.server) as database:
        database.execute(
            "CREATE TABLE orders (id int PRIMARY KEY, note text)",
            "INSERT INTO orders SELECT i, 'order ' || i FROM generate_series(1, 100) i",
            "GRANT SELECT ON orders TO trusted",
            f"CREATE PUBLICATION ingestd_{database.name} FOR TABLE orders WITH"
            " (publish = 'insert, update, delete, truncate', publish_via_partition_root = true)",
        )
        yield database


def wal(secure: TlsServer, shop: Database, lake: Path, **parameters: str) -> str:
    names = f'slot = "ingestd_{shop.name}"\npublication = "ingestd_{shop.name}"'
    dsn = secure.dsn(shop.name, **parameters)
    return wal_config(lake=lake, dsn=dsn, tables=["public.orders"], source_extra=names)


def test_a_daemon_that_verifies(
    secure: TlsServer, shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(wal(secure, shop, lake), environment={"PGSSLMODE": "verify-full"})
    daemon.start_ready()
    unencrypted = """SELECT count(*) FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid)
                      WHERE a.usename = 'trusted' AND NOT s.ssl"""
    encrypted = unencrypted.replace("NOT s.ssl", "s.ssl")
    shop.execute(
        "UPDATE orders SET note = 'changed' WHERE id % 2 = 0", "DELETE FROM orders WHERE id = 1"
    )
    assert_lake_equals_source(shop, lake, slot=f"ingestd_{shop.name}")
    assert shop.value(encrypted) > 0
    assert shop.value(unencrypted) == 0
    assert not daemon.events("tls.weak")
    assert [line for line in checking.check(daemon.config_path) if line.subject == "tls"] == []
    assert daemon.sigterm() == 0


def test_a_daemon_with_verification_off_warns_once(
    secure: TlsServer, shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    config = wal(secure, shop, lake, sslmode="require", host="other.example")
    polled = polling_config(
        lake=lake,
        dsn=secure.dsn(shop.name, sslmode="disable"),
        source="near",
        tables=["public.orders"],
    )
    config += polled[polled.index("[sources.near]") :]
    daemon = make_daemon(config)
    daemon.start_ready()
    shop.execute("DELETE FROM orders WHERE id = 1")
    assert_lake_equals_source(shop, lake, slot=f"ingestd_{shop.name}")
    told = {event["source"]: event for event in daemon.events("tls.weak")}
    assert len(daemon.events("tls.weak")) == 2
    assert (told["shop"]["mode"], told["shop"]["host"]) == ("require", "other.example")
    assert (told["near"]["mode"], told["near"]["host"]) == ("disable", NAME)
    assert all(event["level"] == "warning" for event in told.values())
    lines = [line for line in checking.check(daemon.config_path) if line.subject == "tls"]
    assert [(line.source, line.level) for line in lines] == [("shop", "warn"), ("near", "warn")]
    assert daemon.sigterm() == 0


def test_a_daemon_that_meets_another_server_stops_with_a_remedy(
    secure: TlsServer, shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(wal(secure, shop, lake, host="other.example"))
    daemon.start()
    await_until(
        lambda: daemon.events("source.failed"), LIMIT_S, lambda: f"the failure\n{daemon.tail()}"
    )
    [failed] = daemon.events("source.failed")
    assert failed["state"] == "stopped"
    assert "does not match host name" in failed["reason"]
    assert "host=NAME" in failed["remedy"]
    [fault] = [line for line in checking.check(daemon.config_path) if line.level == "fail"]
    assert "does not match host name" in fault.detail
    assert json.dumps(daemon.status()).count("does not match host name") >= 1
