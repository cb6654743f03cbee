"""The error for a table that can't be read: its own fault, the server's or the connection's."""

from __future__ import annotations

import psycopg
from psycopg import sql

from ingestd.model.errors import IngestdError, TableChangedError, TableError, TransientError
from ingestd.model.row_checks import WITHOUT_ITS_VALUE
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.relation_lock import PUT_BACK
from ingestd.postgres.connection.dsn import role_of
from ingestd.postgres.connection.errors import OF_THE_SERVER, classify, identifier, why_unsendable
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message, server_text

_HOLDERS = sql.SQL(
    "end the session that holds it: SELECT pid, mode, granted FROM pg_catalog.pg_locks"
    " WHERE relation OPERATOR(pg_catalog.=) {}::pg_catalog.regclass;"
)
_GONE = ("42P01", "42703", "3F000")
_RESTRICTED = "55000"
"""The error for a view or foreign table, by `restrict_nonsystem_relation_kind`."""
_NO_MEMORY = psycopg.errors.OutOfMemory


def snapshot_error(
    error: psycopg.Error, table: TableId, dsn: str, *, runs_users_sql: bool = False
) -> IngestdError:
    """Return the result of `read_error`; but locks, and too little memory, affect only this table.

    The table is read again later, while other tables continue.
    """
    if isinstance(error, _NO_MEMORY):
        what = f"the server has too little memory to read it: {loggable_message(error)}"
        return TableChangedError(table, what, remedy=WITHOUT_ITS_VALUE)
    if not isinstance(error, psycopg.errors.LockNotAvailable):
        return read_error(error, table, dsn, runs_users_sql=runs_users_sql)
    return TableChangedError(
        table,
        "could not be read in time: another session holds a lock on it",
        remedy=printed(_HOLDERS.format(sql.Identifier(table.schema, table.name).as_string(None))),
    )


def read_error(
    error: psycopg.Error, table: TableId, dsn: str, *, runs_users_sql: bool = False
) -> IngestdError:
    """Return the error for a table that can't be read: its own fault, or the connection's.

    `runs_users_sql`: as for `loggable_message`.
    """
    what = loggable_message(error, runs_users_sql=runs_users_sql)
    if error.sqlstate in _GONE:
        return TableChangedError(table, f"changed while it was read: {what}")
    if error.sqlstate == _RESTRICTED:
        return TableChangedError(table, f"is no longer a table: {what}", remedy=PUT_BACK)
    if (unsendable := why_unsendable(error)) is not None:
        return TableError(table, f"{unsendable}: {what}", remedy=WITHOUT_ITS_VALUE)
    fault = classify(error, f"table {table}, read", dsn, runs_users_sql=runs_users_sql)
    if error.sqlstate != psycopg.errors.InsufficientPrivilege.sqlstate:
        if isinstance(fault, TransientError) or (error.sqlstate or "08")[:2] in OF_THE_SERVER:
            return fault
        return TableError(table, what, remedy=WITHOUT_ITS_VALUE)
    remedy = fault.remedy
    if "row-level security" not in server_text(error):
        role = identifier(role_of(dsn)) or "<role>"
        schema, name = identifier(table.schema), identifier(table.name)
        remedy = (
            f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {schema}.{name} TO {role};"
        )
    return TableError(table, what, remedy=remedy)
