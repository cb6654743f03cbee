"""Refused connections, with messages in an unknown language."""

from __future__ import annotations

import asyncio
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.errors import OperatorError, TransientError
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ingestd.model.errors import IngestdError


@asynccontextmanager
async def refusing(code: str, text: str, severity: str = "FATAL") -> AsyncIterator[str]:
    """A server that answers each startup message with an ErrorResponse; return its DSN.

    Source: PostgreSQL documentation, "Message Formats".
    """

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!I", await reader.readexactly(4))
        await reader.readexactly(length - 4)
        fields = {"S": severity, "V": "FATAL", "C": code, "M": text}
        body = b"".join(f"{k}{v}\0".encode() for k, v in fields.items()) + b"\0"
        writer.write(b"E" + struct.pack("!I", len(body) + 4) + body)
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"host=127.0.0.1 port={port} user=u dbname=d sslmode=disable gssencmode=disable"


async def refusal(dsn: str) -> IngestdError:
    with pytest.raises(psycopg.Error) as caught:
        await connect(dsn)
    return classify(caught.value, "source shop", dsn)


@pytest.mark.parametrize(
    ("code", "text", "severity", "reason"),
    [
        ("57P03", "the database system is starting up", "FATAL", "server_restarting"),
        ("57P03", "das Datenbanksystem startet", "FATAL", "server_restarting"),
        ("57P03", "データベースシステムは起動処理中です", "致命的エラー", "server_restarting"),
        ("53300", "désolé, trop de clients sont déjà connectés", "FATAL", "too_many_connections"),
    ],
)
async def test_a_transient_refusal_is_known_in_any_language(
    code: str, text: str, severity: str, reason: str
) -> None:
    async with refusing(code, text, severity) as dsn:
        found = await refusal(dsn)
    assert isinstance(found, TransientError)
    assert found.reason == reason
    assert text in found.what


@pytest.mark.parametrize(
    ("code", "text", "remedies"),
    [
        (
            "28P01",
            "Passwort-Authentifizierung für Benutzer »u« fehlgeschlagen",
            ['ALTER ROLE "u" PASSWORD'],
        ),
        ("3D000", "Datenbank »d« existiert nicht", ['CREATE DATABASE "d"']),
        ("3D000", "la base de données « d » n'existe pas", ['CREATE DATABASE "d"']),
        ("28000", "Rolle »u« hat keine Berechtigung zum Einloggen", ['ALTER ROLE "u" LOGIN']),
        ("28000", 'роль "u" не существует', ['CREATE ROLE "u" LOGIN']),
        (
            "28000",
            "aucune entrée dans pg_hba.conf pour l'hôte « ::1 »,\nbase de données « d », sans SSL",
            ['host "d" "u" <address', "pg_reload_conf()"],
        ),
        (
            "42501",
            "droit refusé pour la base de données « d »",
            ['GRANT the privilege named above to "u"'],
        ),
    ],
)
async def test_what_does_not_has_its_remedy_in_any_language(
    code: str, text: str, remedies: list[str]
) -> None:
    """The texts are those of PostgreSQL's own translations."""
    async with refusing(code, text) as dsn:
        found = await refusal(dsn)
    assert isinstance(found, OperatorError)
    assert "; ".join(text.splitlines()) in found.what
    for remedy in remedies:
        assert remedy in str(found.remedy)


async def test_a_server_that_cannot_begin_a_session_is_transient() -> None:
    """It answers the request for encryption with an error, as in the middle of a failover."""
    async with refusing("57P03", "not now") as dsn:
        found = await refusal(dsn.replace("sslmode=disable", "sslmode=require"))
    assert isinstance(found, TransientError)
    assert found.reason == "server_restarting"


def test_a_lack_of_writable_servers_is_transient() -> None:
    """What libpq reports of a standby, or of two, under `target_session_attrs`."""
    said = (
        "connection failed: session is read-only\nhost: '127.0.0.1': server is in hot standby mode"
    )
    found = classify(psycopg.OperationalError(said), "source shop")
    assert isinstance(found, TransientError)
    assert found.reason == "unreachable"


async def test_a_refusal_in_english_has_the_one_fitting_remedy() -> None:
    async with refusing("28000", 'role "u" is not permitted to log in') as dsn:
        found = await refusal(dsn)
    assert found.remedy == 'ALTER ROLE "u" LOGIN;'


async def test_what_has_no_code_that_is_known_stays_what_it_is() -> None:
    async with refusing("XX999", "etwas anderes") as dsn:
        found = await refusal(dsn)
    assert isinstance(found, OperatorError)
    assert "etwas anderes" in found.what
    assert "its log" in str(found.remedy)
