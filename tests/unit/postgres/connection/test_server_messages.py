"""What is logged of a server's errors, which may quote rows."""

from __future__ import annotations

import re

import psycopg
import pytest

from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.server_messages import loggable_message

VALUE = "canary@example.org"


def of(code: str, text: str) -> psycopg.Error:
    kind = psycopg.errors.lookup(code)
    return kind(text)


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        (
            "22P02",
            f'invalid input syntax for type integer: "a"{VALUE}"\nb"',
            "InvalidTextRepresentation, SQLSTATE 22P02 (",
        ),
        ("22P02", f"ungültige Eingabesyntax für Typ integer: »{VALUE}«", "SQLSTATE 22P02"),
        ("22P02", f"syntaxe en entrée invalide pour le type integer : « {VALUE} »", "22P02"),
        ("22P02", f"la sintaxis de entrada no es válida para tipo integer: «{VALUE}»", "22P02"),
        ("22003", f'値"{VALUE}"は型integerの範囲外です', "NumericValueOutOfRange, SQLSTATE 22003"),
        ("HV000", f"remote says: {VALUE}", "FdwError, SQLSTATE HV000"),
        ("P0001", f"no good: {VALUE}", "a function raised P0001"),
        ("38000", f"ValueError: {VALUE}", "a function raised 38000"),
        ("42703", f'column "{VALUE}" does not exist', "UndefinedColumn, SQLSTATE 42703 ("),
        ("42P01", f'relation "{VALUE}" does not exist', "UndefinedTable, SQLSTATE 42P01"),
        ("42704", f'role "{VALUE}" does not exist', "UndefinedObject, SQLSTATE 42704"),
        ("42883", f'function "{VALUE}" does not exist', "UndefinedFunction, SQLSTATE 42883"),
        ("3F000", f'schema "{VALUE}" does not exist', "InvalidSchemaName, SQLSTATE 3F000"),
        ("58P01", f'could not open file "{VALUE}"', "UndefinedFile, SQLSTATE 58P01"),
        ("0A000", f'unit "{VALUE}" not supported', "FeatureNotSupported, SQLSTATE 0A000"),
        ("55P04", f'unsafe use of new value "{VALUE}"', "UnsafeNewEnumValueUsage"),
        ("42501", "permission denied for table t", "permission denied for table t"),
        ("55P03", "could not obtain lock", "could not obtain lock"),
        ("23505", 'duplicate key value violates unique constraint "u"', 'constraint "u"'),
    ],
)
def test_no_value_of_a_row_is_logged(code: str, text: str, told: str) -> None:
    found = loggable_message(of(code, text))
    assert told in found
    assert VALUE not in found
    assert "\n" not in found


def test_nothing_of_a_statement_with_user_sql_is_logged() -> None:
    for code in ("42501", "57014", "XX000", "53200", "08006", "23505"):
        found = loggable_message(of(code, VALUE), runs_users_sql=True)
        assert VALUE not in found
        assert code in found


def test_every_loggable_error_class_is_chosen() -> None:
    """A class that PostgreSQL adds is not logged before it has been reviewed."""
    told = {
        code[:2]
        for code in psycopg.errors.__dict__["_sqlcodes"]
        if re.fullmatch("[0-9A-Z]{5}", code) and VALUE in loggable_message(of(code, VALUE))
    }
    assert told == {"08", "23", "25", "28", "3D", "40", "42", "53", "54", "55", "57", "XX"}


def test_a_servers_text_is_cut() -> None:
    error = psycopg.OperationalError("FATAL:  " + "x" * 40_000_000)
    assert len(loggable_message(error)) < 2_100
    fault = classify(error, "source shop")
    assert len(str(fault)) < 3_000


def test_the_address_is_left_to_the_caller() -> None:
    text = (
        'connection to server at "10.0.0.5", port 5432 failed: FATAL:  no\n'
        'connection to server on socket "/run/x" failed: gone\n'
    )
    assert loggable_message(psycopg.OperationalError(text)) == "FATAL:  no; gone"
