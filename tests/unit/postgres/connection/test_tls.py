"""What holds for TLS, by what was written where. Nothing is connected to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from psycopg import pq

from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.session import parameters_of
from ingestd.postgres.connection.tls import check_line, secured, system_roots, transport
from tests.harness.source_code import READS_CODE, modules, name_of, nodes, text_of

_MAKES = re.compile(r"([\w.]*\.)?(psycopg|\w*Connection|PGconn)\.connect")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No environment, no home, no certificates of the system."""
    for name in ("HOST", "HOSTADDR", "SSLMODE", "REQUIRESSL", "SSLROOTCERT", "SERVICE"):
        monkeypatch.delenv(f"PG{name}", raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    monkeypatch.setenv("HOME", str(tmp_path))


def mode(dsn: str) -> str | None:
    """The sslmode that is added to a DSN's own."""
    return secured(read_dsn(dsn)).get("sslmode")


@pytest.mark.parametrize(
    "dsn",
    [
        "host=db.example",
        "postgresql://u@db.example/d",
        "host=10.0.0.5",
        "hostaddr=10.0.0.5",
        "host=localhost hostaddr=10.0.0.5",
        "host=db.example hostaddr=127.0.0.1",  # a tunnel, perhaps: it leads elsewhere
        "host=127.0.0.1,db.example",
        "host=/run/postgresql,db.example",
        "host=,db.example",
        "host=::2",
        "host=fe80::1",
        "host=localhost.example",
        "host=127.0.0.1.example",
        "host=0.0.0.0",
        "host=db.example sslmode=verify-full",
    ],
)
def test_another_machine_has_to_be_who_it_says(dsn: str) -> None:
    assert mode(dsn) == "verify-full"


@pytest.mark.parametrize(
    "dsn",
    [
        "",
        "dbname=d",
        "host=",
        "host=/run/postgresql",
        "host=@abstract",
        "host=127.0.0.1",
        "host=127.8.9.10",
        "host=::1",
        "postgresql://u@[::1]:5432/d",
        "host=::ffff:127.0.0.1",
        "host=LOCALHOST",
        "host=localhost. port=5433",
        "host=/run/a,/run/b",
        "host=127.0.0.1,::1,localhost",
        "hostaddr=127.0.0.1",
    ],
)
def test_this_machine_is_asked_for_nothing(dsn: str) -> None:
    assert secured(read_dsn(dsn)) == {}


@pytest.mark.parametrize("weaker", ["disable", "allow", "prefer", "require", "verify-ca"])
def test_a_weaker_mode_holds_where_it_is_written_out(
    weaker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert secured(read_dsn(f"host=db.example sslmode={weaker}")) == {}
    assert secured(read_dsn(f"postgresql://db.example/d?sslmode={weaker}")) == {}
    line = check_line("shop", read_dsn(f"host=db.example sslmode={weaker}"))
    assert line is not None
    assert (line.subject, line.level) == ("tls", "warn")
    assert f"sslmode={weaker} to db.example" in line.detail
    assert check_line("shop", read_dsn(f"host=127.0.0.1 sslmode={weaker}")) is None
    monkeypatch.setenv("PGSSLMODE", weaker)
    assert secured(read_dsn("host=db.example")) == {}
    assert check_line("shop", read_dsn("host=db.example")) is not None


def test_the_dsn_is_stronger_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "disable")
    assert mode("host=db.example sslmode=verify-full") == "verify-full"
    monkeypatch.setenv("PGHOST", "db.example")
    monkeypatch.delenv("PGSSLMODE")
    assert mode("dbname=d") == "verify-full"
    assert mode("host=127.0.0.1") is None


def test_a_service_file_is_read_as_libpq_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = "[silent]\nhost=db.example\n[weak]\nhost=db.example\nsslmode=require\n"
    services += "[near]\nhost=127.0.0.1\n[preferring]\nhost=db.example\nsslmode=prefer\n"
    (tmp_path / "services").write_text(services)
    assert mode("service=silent") == "verify-full"
    assert mode("service=weak") is None
    assert mode("service=near") is None
    assert mode("service=preferring") == "verify-full"  # as libpq's own default looks
    assert mode("service=unheard_of") == "verify-full"
    monkeypatch.setenv("PGSERVICE", "weak")
    assert mode("dbname=d") is None
    line = check_line("shop", read_dsn("dbname=d"))
    assert line is not None
    assert "sslmode=require to db.example" in line.detail


def test_nothing_to_say_about_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_line("shop", read_dsn("host=db.example")) is None
    assert transport(read_dsn("host=db.example")).mode is None
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert check_line("shop", read_dsn("host=db.example")) is None


def test_whose_certificates_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "bundle.pem"
    bundles = (str(tmp_path / "none.pem"), str(bundle))

    def roots(dsn: str = "host=db.example") -> str | None:
        return secured(read_dsn(dsn), bundles=bundles).get("sslrootcert")

    assert roots() == "system"
    bundle.touch()
    monkeypatch.setattr(pq, "__impl__", "binary")  # whose OpenSSL has no certificates
    assert roots() == str(bundle)
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    assert roots() == "system"
    monkeypatch.delenv("SSL_CERT_DIR")
    monkeypatch.setattr(pq, "__impl__", "c")
    assert roots() == "system"
    monkeypatch.setattr(pq, "version", lambda: 150000)
    assert roots() == str(bundle)
    assert roots("host=db.example sslmode=verify-full") == str(bundle)
    assert roots("host=db.example sslrootcert=/ca.pem") is None
    assert roots("host=db.example sslmode=verify-ca") is None
    monkeypatch.setenv("PGSSLROOTCERT", "/ca.pem")
    assert roots() is None
    monkeypatch.delenv("PGSSLROOTCERT")
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").touch()
    assert roots() is None
    bundle.unlink()
    (tmp_path / ".postgresql/root.crt").unlink()
    assert system_roots(bundles) is None


def test_what_every_connection_is_made_with() -> None:
    found = parameters_of("host=db.example dbname=d sslrootcert=/ca.pem options='-c a=b'")
    assert found["sslmode"] == "verify-full"
    assert found["sslrootcert"] == "/ca.pem"
    assert found["host"] == "db.example"
    assert found["application_name"] == "ingestd"
    assert "port" not in found
    assert "sslmode" not in parameters_of("host=/run/postgresql dbname=d")


MAKERS = {
    "ingestd/postgres/connection/session.py": 2,  # with `parameters_of`
    "ingestd/postgres/polling/server.py": 1,  # the same
    "ingestd/postgres/connection/pooler.py": 1,  # with what one of those gives
    "ingestd/postgres/connection/liveness.py": 1,  # the same
}
"""Where connections are made, and how many calls do it."""


@READS_CODE
def test_every_connection_is_made_in_one_way() -> None:
    found: dict[str, int] = {}
    for path in modules("ingestd", "spark_jobs"):
        name = name_of(path)
        if name.startswith(("ingestd/demo/", "ingestd/testing/")):
            continue  # on its servers, on loopback
        for node in nodes(text_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr == "connect" and _MAKES.fullmatch(ast.unparse(node.func)):
                found[name] = found.get(name, 0) + 1
    assert found == MAKERS
