"""Classification of a source's errors, and remedies.

Source of the codes: PostgreSQL documentation, "PostgreSQL Error Codes". When connecting fails,
libpq provides no code, only text. `refusals` finds the code if the text is in another language.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import psycopg
from psycopg import sql

from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.postgres.connection.answer_size import TOO_LARGE
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.refusals import OF_A_SERVER
from ingestd.postgres.connection.server_messages import loggable_message, server_text
from ingestd.process.file_limit import TOO_MANY_FILES, are_left, none_left

FULL = "too_many_connections"
"""The reason when a server, a pooler or the role has no connections left."""

_TRANSIENT_CODES = {
    "08": "connection_lost",
    "57P01": "server_restarting",
    "57P02": "server_restarting",
    "57P03": "server_restarting",
    "57P05": "connection_lost",
    "53300": FULL,
    "55P03": "lock_timeout",
    "40P01": "deadlock",
    "53200": "out_of_memory",
    "40001": "recovery_conflict",
    "55006": "slot_active",
    "57014": "timeout",
    "25P03": "timeout",
    "25P04": "timeout",
}
"""Maps a code, or its two-character class, to the reason."""


UNSENDABLE = "a row is larger, as text, than the 1 GB that the server can send"
"""Two characters per byte of bytea. With REPLICA IDENTITY FULL the old row counts, too."""
TOO_DEEP = "a value is nested too deeply for the server to output it (max_stack_depth)"
_NOT_OUTPUT = "the server can't output a row"
OF_THE_SERVER = frozenset({"08", "25", "26", "28", "3D", "40", "53", "55", "57", "58", "F0"})
"""Error classes that have reasons outside of what is read: the connection, role, transaction or
resources. Any other one is of values, their types' output, functions or damage."""
_LARGE_ALLOCATION = "invalid memory alloc request size"
_OF_A_VALUE = re.compile(
    r'slot "[^"]*", output plugin "[^"]*", in the (?:stream_)?change callback, associated LSN (\S+)'
)
"""From the English context of an error in decoding: of the output of one row, and not before it."""
_SLOTS = "replication slots"
"""From the English message; in other languages only the name of the limit identifies it."""
_NOT_MAPPED = "could not map filen"
"""From a message that the server does not translate: filenumber, up to 15 filenode."""


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator must act; `{role}` and `{database}` are filled in as SQL identifiers."""

    remedy: str


_CREATE_ROLE = "CREATE ROLE {role} LOGIN PASSWORD '...';  (for kind wal: LOGIN REPLICATION)"
_ROLE_MISSING = _Operator(f"{_CREATE_ROLE}  or correct the role in `dsn`")
# The server reports a missing role as a wrong password.
_PASSWORD = _Operator(
    "correct the role or the password in `dsn`, or ALTER ROLE {role} PASSWORD '...';\n"
    f"  if the role does not exist, which the server does not report: {_CREATE_ROLE}"
)
_OTHERWISE = "or, if you trust the process that listens there, in `dsn`: require_auth="
_NO_CLEARTEXT = _Operator(
    "on the server: password_encryption = 'scram-sha-256', scram-sha-256 in pg_hba.conf, then "
    f"ALTER ROLE {{role}} PASSWORD '...';\n  {_OTHERWISE}password"
)
_NO_MD5 = _Operator(
    "on the server: password_encryption = 'scram-sha-256', then ALTER ROLE {role} PASSWORD '...';"
    f"\n  {_OTHERWISE}md5"
)
_NO_REQUEST = _Operator(
    "remove the password from `dsn`, PGPASSWORD or the password file: the server asks for none "
    f"(trust, peer, a certificate)\n  {_OTHERWISE}none"
)
_OTHER_METHOD = _Operator(
    "on the server: scram-sha-256 in pg_hba.conf for {role}\n  or name the method that it requests "
    "in `dsn`: require_auth=gss"
)
_DATABASE_MISSING = _Operator("correct the database name in `dsn`, or CREATE DATABASE {database};")
_HBA = _Operator(
    "add to pg_hba.conf: host {database} {role} <address of this machine>/32 scram-sha-256  "
    "and then: SELECT pg_catalog.pg_reload_conf();"
)
_REFUSED = _Operator(
    f"the server's message means one of three things: the role is missing: {_CREATE_ROLE}\n"
    "  it may not log in: ALTER ROLE {role} LOGIN;\n  no pg_hba.conf entry matches; add: host "
    "{database} {role} <address of this machine>/32 scram-sha-256  and then: SELECT "
    "pg_catalog.pg_reload_conf();"
)
_NO_REPLICATION = _Operator("ALTER ROLE {role} REPLICATION;  (as a superuser)")
_NO_CONNECT = _Operator("GRANT CONNECT ON DATABASE {database} TO {role};")
_NO_LOGIN = _Operator("ALTER ROLE {role} LOGIN;")
_RIGHT = _Operator("GRANT the privilege named above to {role}, as the object's owner or superuser")
_UNDEFINED = _Operator("correct the setting that names it, or create the missing object")
_UNMAPPED = _Operator(
    "if this recurs: the server missed an ALTER or TRUNCATE that ran while this slot was created "
    "(servers up to 18): SELECT pg_catalog.pg_drop_replication_slot({slot});  -- all tables are "
    "read "
    "again"
)
_POLICY = _Operator("ALTER ROLE {role} BYPASSRLS;  (as a superuser)")
_LIMIT = _Operator(
    "ALTER SYSTEM SET the limit named above to a higher value, then restart the server; for "
    "temp_file_limit SELECT pg_catalog.pg_reload_conf(); is enough, and values set by ALTER ROLE "
    "or ALTER DATABASE take precedence"
)
FREE_A_SLOT = (
    "ALTER SYSTEM SET max_replication_slots = ... higher; then restart the server; or drop an "
    "unused slot"
)
FREE_A_SENDER = (
    "ALTER SYSTEM SET max_wal_senders = ... higher; then restart the server; or end a client "
    "listed in pg_stat_replication"
)
FREE_A_CONNECTION = "close connections, or raise the limit named above on the server"
_NO_SLOT = _Operator(FREE_A_SLOT)
_TLS = _Operator("set sslmode (and sslrootcert) in `dsn` to match what the server offers")
_UNENCRYPTED = "or, on a trusted network, set a weaker sslmode explicitly in `dsn`"
_NO_TLS = _Operator(
    "on the server: ssl_cert_file, ssl_key_file, ALTER SYSTEM SET ssl = on; "
    f"SELECT pg_catalog.pg_reload_conf();\n  {_UNENCRYPTED}"
)
_UNKNOWN_CA = _Operator(
    "sslrootcert=FILE in `dsn`, with the certificate of the CA that signed the server's "
    f"(providers offer it for download)\n  {_UNENCRYPTED}"
)
_OTHER_NAME = _Operator(
    "host=NAME in `dsn`, with a name in its certificate (and hostaddr=ADDRESS to connect to), "
    f"or a certificate issued for this name\n  {_UNENCRYPTED}"
)
_CLIENT_CERTIFICATE = _Operator(
    "sslcert=FILE and sslkey=FILE in `dsn`: a certificate for {role}, signed by a CA in the "
    "server's ssl_ca_file; the key readable only by this account (chmod 600)"
)

_NO_UTF8 = _Operator(
    "the server can't convert the database's encoding to UTF-8: copy it into a database in UTF-8 "
    "(MULE_INTERNAL by way of another encoding: pg_dump -E EUC_JP, or the one of its language)"
)

_OPERATOR_CODES = {
    "28000": _REFUSED,
    "28P01": _PASSWORD,
    "3D000": _DATABASE_MISSING,
    "42501": _RIGHT,
    "42704": _UNDEFINED,
    "53400": _LIMIT,
}

_UNKNOWN = "correct what the server reports; its log at that time has details"
_TOO_LARGE = _Operator(
    "if it is the server that you mean, include fewer tables with `tables`, or split them between"
    " several sources"
)
_IN_SLOT = re.compile(r'slot "([a-z0-9_]+)", output plugin')
_NO_WORDS = "no error details available"
"""psycopg's text when libpq has no message."""

# In this order: with several hosts the text has the failure of each, and a server's own message is
# more useful than an unreachable host.
_TEXTS: tuple[tuple[str, str | _Operator], ...] = (
    (r"the database system is (starting up|shutting down|in recovery mode|not yet)", "restart"),
    (r"the database system is not accepting connections", "restart"),
    (r"conflict with recovery", "conflict"),
    (r"terminating connection due to administrator command", "restart"),
    (r"sorry, too many clients already", "full"),
    (r"no more connections allowed|query_wait_timeout", "full"),  # PgBouncer
    (r"remaining connection slots are reserved", "full"),
    (r"too many connections for (role|database)", "full"),
    (r"number of requested standby connections exceeds max_wal_senders", "full"),
    (r"method requirement \S+ failed: \w+ requested a cleartext", _NO_CLEARTEXT),
    (r"method requirement \S+ failed: \w+ requested a hashed", _NO_MD5),
    (r"method requirement \S+ failed: \w+ did not complete auth", _NO_REQUEST),
    (r"authentication method requirement \S+ failed", _OTHER_METHOD),
    (r"certificate authentication failed", _CLIENT_CERTIFICATE),
    (r"valid client certificate|certificate required|alert unknown ca", _CLIENT_CERTIFICATE),
    (r"private key file|could not (load|read) certificate file", _CLIENT_CERTIFICATE),
    (r"(password|SASL|SCRAM)\S* authentication failed", _PASSWORD),
    (r"no password supplied", _PASSWORD),
    (r"authentication failed for user", _PASSWORD),
    (r"no pg_hba\.conf entry|pg_hba\.conf rejects", _HBA),
    (r'role "[^\n]*" does not exist', _ROLE_MISSING),
    (r'role "[^\n]*" is not permitted to log in', _NO_LOGIN),
    (r'database "[^\n]*" does not exist|no such database:', _DATABASE_MISSING),
    (rf"^{TOO_LARGE}", _TOO_LARGE),
    (r"must be superuser or replication role to start walsender", _NO_REPLICATION),
    (r"permission denied to start WAL sender", _NO_REPLICATION),
    (r"permission denied for database", _NO_CONNECT),
    (r"does not match host name|host name must be specified for a verified", _OTHER_NAME),
    (r"certificate verify failed|root certificate file \S+ does not exist", _UNKNOWN_CA),
    (r"server does not support SSL", _NO_TLS),
    (r"certificate|SSL error|unsupported protocol", _TLS),
    (r"conversion between UTF8 and \S+ is not supported", _NO_UTF8),
    (r"Connection refused|No such file or directory", "unreachable"),
    (r"No route to host|Network is unreachable|[Tt]ime(d )?out|timeout expired", "unreachable"),
    (r"failed to resolve host|could not translate host name", "unreachable"),
    (r"pgbouncer cannot connect to server|server login has been failing", "unreachable"),
    # During a failover: no session could be started, or no standby has been promoted yet.
    (r"server sent an error response during SSL exchange", "restart"),
    (r"session is (not )?read-only|server is (not )?in hot standby mode", "unreachable"),
    (r"server closed the connection|the connection is (closed|lost|bad)", "lost"),
    (r"Connection reset by peer|Broken pipe|EOF detected|unexpected eof", "lost"),
    (r"no connection to the server|connection not open|consuming input failed", "lost"),
)
_REASONS = {
    "restart": "server_restarting",
    "full": FULL,
    "conflict": "recovery_conflict",
    "unreachable": "unreachable",
    "lost": "connection_lost",
}
_TRANSIENT_REMEDIES = {
    "unreachable": "check host and port in `dsn`, that the server is running and no firewall "
    "blocks the port",
    FULL: FREE_A_CONNECTION,
    "slot_active": "stop the other client of this slot, or set a different name in `slot`",
    "recovery_conflict": "ALTER SYSTEM SET hot_standby_feedback = on; SELECT "
    "pg_catalog.pg_reload_conf();  on "
    "the standby, or raise its max_standby_streaming_delay",
}
"""Remedies in case the error does not pass automatically."""


def classify(
    error: psycopg.Error, where: str, dsn: str | None = None, *, runs_users_sql: bool = False
) -> IngestdError:
    """Classify a source's error (design section 6).

    Transient only if known to pass automatically; any unknown error needs an operator. The message
    has `where`, host, port, database, user and the server's message; never the DSN. (`dsn` supplies
    place and role if the error lacks them: psycopg's errors have them only while connecting.)
    `runs_users_sql`: as for `loggable_message`.
    """
    place = _place(error, dsn)
    if _has_no_files(error):
        return none_left(where)
    meaning = _by_code(error) if error.sqlstate else _by_text(server_text(error))
    message = loggable_message(error, runs_users_sql=runs_users_sql)
    unsendable = why_unsendable(error)
    message = f"{unsendable}: {message}" if unsendable else message
    what = f"{where}: {message}"
    if place:
        what += " (" + ", ".join(f"{name} {value}" for name, value in place.items()) + ")"
    if isinstance(meaning, str):
        remedy = FREE_A_SENDER if _has_no_sender(error) else _TRANSIENT_REMEDIES.get(meaning)
        return TransientError(what, reason=meaning, remedy=remedy)
    if meaning is None:
        return OperatorError(what, remedy=_UNKNOWN)
    names = {
        "role": identifier(place.get("user")) or "<role>",
        "database": identifier(place.get("database")) or "<database>",
        "slot": _slot_of(error),
    }
    return OperatorError(what, remedy=meaning.remedy.format(**names))


def _slot_of(error: psycopg.Error) -> str:
    """Return the slot whose decoding failed as a literal, from the error's context."""
    found = _IN_SLOT.match(error.diag.context or "")
    return f"'{found[1]}'" if found is not None else "'<slot>'"


def lost(error: EOFError | OSError) -> str:
    """Return a message that the connection ended, which the system's error text omits."""
    words = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if not words:
        return "the server closed the connection unexpectedly"
    return f"the connection to the server was lost: {words}"


def why_unsendable(error: BaseException | None) -> str | None:
    """Return why the server could not output a row that it should send; None for other errors.

    Class 54: a limit of the server that a value or a row exceeds, by its size or its depth.
    """
    if isinstance(error, psycopg.errors.StatementTooComplex):
        return TOO_DEEP
    if isinstance(error, psycopg.errors.ProgramLimitExceeded):
        return UNSENDABLE
    if not isinstance(error, psycopg.Error):
        return None
    if isinstance(error, psycopg.errors.InternalError_):
        return UNSENDABLE if _LARGE_ALLOCATION in server_text(error) else None
    return _NOT_OUTPUT if (error.sqlstate or "").startswith("54") else None


def is_of_a_row(error: BaseException | None) -> bool:
    """Return whether decoding failed at one row that the server can't output, and will again.

    The context shows that, if it is in English: output functions of types raise any code. Otherwise
    the code does: of a limit, or of data (a conversion to UTF-8, an enum's label that is missing).
    Errors that pass are not of the row, nor are those of the server, like the limit of a file to
    which a drain writes it; for a lack of memory that is not known.
    """
    if isinstance(error, psycopg.errors.OutOfMemory):
        return failed_row_at(error) is not None
    if not isinstance(error, psycopg.Error) or not is_of_what_is_read(error):
        return False
    if why_unsendable(error) is not None or isinstance(error, psycopg.DataError):
        return True
    return failed_row_at(error) is not None


def is_of_what_is_read(error: psycopg.Error) -> bool:
    """Return whether a query failed at the values that it reads, and will again.

    So does any error that is not the server's and does not pass: output functions raise any code.
    """
    if isinstance(_by_code(error), str):
        return False
    return (error.sqlstate or "08")[:2] not in OF_THE_SERVER


def failed_row_at(error: BaseException | None) -> str | None:
    """Return the position of the row at which decoding failed; None if the error lacks it."""
    if not isinstance(error, psycopg.Error) or error.sqlstate is None:
        return None
    found = _OF_A_VALUE.search(error.diag.context or "")
    return None if found is None else found[1]


def identifier(name: str | None) -> str | None:
    """Quote a name as an SQL identifier."""
    return None if name is None else printed(sql.Identifier(name))


def is_understood(text: str) -> bool:
    """Return whether the text of a connection failure matches a known message."""
    return _by_text(text) is not None


def _has_no_files(error: psycopg.Error) -> bool:
    """Return whether no file could be opened; libpq may have no message for that."""
    if error.sqlstate is not None:
        return False
    text = server_text(error)
    is_of_here = TOO_MANY_FILES in text and f"{TOO_MANY_FILES} in system" not in text
    if is_of_here and not OF_A_SERVER.search(text):
        return True
    return _NO_WORDS in text and not are_left()


def _has_no_sender(error: psycopg.Error) -> bool:
    return error.sqlstate is None and "max_wal_senders" in server_text(error)


def _by_code(error: psycopg.Error) -> str | _Operator | None:
    code = error.sqlstate or ""
    if code == "42501" and "row-level security" in server_text(error):
        return _POLICY
    if code == "53400" and _SLOTS in server_text(error):
        return _NO_SLOT
    if code == "XX000" and _NOT_MAPPED in server_text(error):
        return _UNMAPPED
    # 28000 covers all authorization errors except a wrong password: the text may be more specific.
    if code == "28000" and (fault := _by_text(server_text(error))) is not None:
        return fault
    return _TRANSIENT_CODES.get(code) or _TRANSIENT_CODES.get(code[:2]) or _OPERATOR_CODES.get(code)


def _by_text(text: str) -> str | _Operator | None:
    for pattern, meaning in _TEXTS:
        if re.search(pattern, text):
            return _REASONS[meaning] if isinstance(meaning, str) else meaning
    return None


def _place(error: psycopg.Error, dsn: str | None) -> dict[str, str]:
    """Return host, port, database and user, as far as known."""
    connection = error.pgconn
    if connection is not None:
        try:
            found = {
                "host": connection.host,
                "port": connection.port,
                "database": connection.db,
                "user": connection.user,
            }
        except psycopg.Error:  # closed: it has no information any more
            found = {}
        if any(found.values()):
            return {k: v.decode(errors="replace") for k, v in found.items() if v}
    if dsn is None:
        return {}
    parameters = read_dsn(dsn)
    names = {"host": "host", "port": "port", "database": "dbname", "user": "user"}
    return {
        ours: str(parameters[theirs]) for ours, theirs in names.items() if parameters.get(theirs)
    }


def cut_off(text: str) -> psycopg.Error:
    """Return the error that psycopg raises when the server closes the connection: a failpoint's."""
    return psycopg.OperationalError(f"server closed the connection unexpectedly ({text})")
