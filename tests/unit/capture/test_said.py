"""What is told of a server's errors, which may quote rows."""

from __future__ import annotations

import psycopg
import pytest

from ingestd.capture.said import said

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
        ("42703", 'column "note" does not exist', 'column "note" does not exist'),
        ("23505", 'duplicate key value violates unique constraint "u"', 'constraint "u"'),
    ],
)
def test_no_value_of_a_row_is_told(code: str, text: str, told: str) -> None:
    found = said(of(code, text))
    assert told in found
    assert VALUE not in found
    assert "\n" not in found


def test_where_it_was_is_told_elsewhere() -> None:
    text = (
        'connection to server at "10.0.0.5", port 5432 failed: FATAL:  no\n'
        'connection to server on socket "/run/x" failed: gone\n'
    )
    assert said(psycopg.OperationalError(text)) == "FATAL:  no; gone"
