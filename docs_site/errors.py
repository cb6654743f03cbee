"""docs/reference/errors.md: every error and its remedy, from the code that raises it."""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING

from docs_site.error_texts import KINDS, Text, texts
from docs_site.markdown import MADE_BY, table
from ingestd.config import errors as config_errors
from ingestd.lake.store import errors as faults
from ingestd.model.errors import PROTOCOL_REMEDY
from ingestd.postgres.connection import errors as source_faults

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_INTRO = """# Errors

An error says what failed, where, and what to do about it; it never contains a value of a row or a secret.
The daemon logs it ([events](events.md): `source.failed`, `table.stopped`, ...), shows it in `/status`,
`/readyz` and on the page; a command prints it, with `remedy:`. Parts that vary are in `<>`. All errors of
a kind have the same effect:

| kind | the daemon | a command's exit code |
|---|---|---|
| transient | backs off 0.5 s to 30 s and retries; `ingestd_restarts_total{reason}` counts | 75 |
| operator | stops that source, retries every 60 s; `/readyz` answers 503 | 1 |
| table | stops that table (`stopped` in `_tables`), the others continue | 1 |
| table, re-read | re-reads the table in its current state | 1 |
| usage | does not start | 2 |
| refused | answers the request with an HTTP status, changes nothing | - |

## What happens when

| fault | behaviour |
|---|---|
| connection lost, server restarting, too many connections, slot in use by another pid, storage 5xx, \
timeouts, throttling | transient: the other sources continue; metric and log once for each change of state |
| wrong password, no REPLICATION, `wal_level` not logical, slot or publication missing with \
`manage = false`, disk full in the lake | operator: the error has the SQL or command that fixes it |
| a table whose replica identity the publication would break | that table is refused, with the reason; \
it is never published |
| slot invalidated, dropped, or missing after a failover | `slot_lost`: a new slot, and all tables are \
re-read while the old rows stay available. A gap is never silent |
| promoted standby: another timeline, or a slot behind or ahead of the lake's position | identifier, \
timeline and positions are compared with the lake: the source continues, or its slot counts as lost |
| unknown error | operator: never guessed, never skipped; `source.unknown_error` in the log |

More about the network, the lake and power failures: [faults](../faults.md).
"""
_PLACES: Sequence[tuple[str, Sequence[str]]] = (
    (
        "The config file",
        (
            "ingestd/config/*.py",
            "ingestd/postgres/settings.py",
        ),
    ),
    (
        "A source read by its WAL",
        (
            "ingestd/postgres/wal/**/*.py",
            "ingestd/postgres/rewrites/ddl_*.py",
        ),
    ),
    ("A source that is polled", ("ingestd/postgres/polling/**/*.py",)),
    (
        "Any source, and its tables",
        (
            "ingestd/postgres/*.py",
            "ingestd/postgres/captured/*.py",
            "ingestd/postgres/catalog/*.py",
            "ingestd/postgres/connection/*.py",
            "ingestd/postgres/rewrites/[!d]*.py",
            "ingestd/postgres/rewrites/dependent*.py",
            "ingestd/postgres/snapshot/*.py",
            "ingestd/postgres/transport/*.py",
            "ingestd/model/row_checks.py",
        ),
    ),
    ("The run of a source", ("ingestd/pipeline/**/*.py", "ingestd/process/file_limit.py")),
    ("The lake", ("ingestd/lake/**/*.py",)),
    ("Reading a lake without Spark", ("ingestd/reading/*.py",)),
    (
        "HTTP and the commands",
        (
            "ingestd/app/*.py",
            "ingestd/cli/**/*.py",
            "ingestd/http/*.py",
            "ingestd/observe/*.py",
            "ingestd/failpoints.py",
        ),
    ),
    ("The demo", ("ingestd/demo/*.py", "ingestd/testing/embedded/*.py")),
    ("Spark jobs", ("spark_jobs/**/*.py",)),
    ("The protocol", ("ingestd/decode/**/*.py",)),
)
_USAGE_VALUES = "The config file"
"""On this page pydantic turns a ValueError into a fault of the key."""
_PROTOCOL = (
    "The server, or something in between, sent bytes that violate the protocol. Nothing is guessed:"
    " the source stops, or only the table if it is read separately (a snapshot), and nothing"
    f" incomplete is kept. The remedy of all of them:\n\n> {PROTOCOL_REMEDY}\n\n"
)


def page(root: Path) -> str:
    """Return the page for the checkout at `root`."""
    parts = [MADE_BY, _INTRO, *_server(), *_storage()]
    for title, patterns in _PLACES:
        rows = [
            (_code(t.what), f"{t.kind} (`{t.reason}`)" if t.reason else t.kind, _code(t.remedy))
            for t in _texts(root, title, patterns)
        ]
        parts.append(f"\n## {title}\n\n{_PROTOCOL if title == 'The protocol' else ''}")
        parts.append(table(("message", "kind", "remedy"), rows))
    return "".join(parts)


def _texts(root: Path, title: str, patterns: Sequence[str]) -> list[Text]:
    kinds = [k for k in KINDS if k != "ValueError" or title == _USAGE_VALUES]
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    found = {text for path in paths for text in texts(path, kinds)}
    if title == _USAGE_VALUES:
        words = config_errors._WORDS  # noqa: SLF001 - the page lists the module's texts
        found |= {Text(word, KINDS["KeyPathError"], "", "") for word in words.values()}
    return sorted(found)


def _server() -> Iterator[str]:
    yield "\n## What a Postgres server answers\n\n"
    yield "By the code of the error or, while connecting, by the message of the server, a pooler or libpq.\n\n"
    head = ("answer", "kind", "remedy")
    yield table(head, sorted(set(_server_rows())))


def _server_rows() -> Iterator[tuple[str, str, str]]:
    remedies = source_faults._TRANSIENT_REMEDIES  # noqa: SLF001
    for code, reason in source_faults._TRANSIENT_CODES.items():  # noqa: SLF001
        yield f"SQLSTATE {code}", f"transient (`{reason}`)", _code(remedies.get(reason, ""))
    for code, meant in source_faults._OPERATOR_CODES.items():  # noqa: SLF001
        yield f"SQLSTATE {code}", "operator", _code(meant.remedy or "")
    for pattern, meaning in source_faults._TEXTS:  # noqa: SLF001
        if isinstance(meaning, str):
            reason = source_faults._REASONS[meaning]  # noqa: SLF001
            yield _readable(pattern), f"transient (`{reason}`)", _code(remedies.get(reason, ""))
        else:
            yield _readable(pattern), "operator", _code(meaning.remedy or "")


def _readable(pattern: str) -> str:
    """Return a regular expression in readable form."""
    plain = re.sub(r"\\S[*+]|\[\^\\n\]\*", "...", pattern).replace("\\.", ".").replace("|", " / ")
    return _code(plain)


def _storage() -> Iterator[str]:
    yield "\n## What the lake's file system answers\n\n"
    rows = [
        (errno.errorcode[number], _code(f"lake <uri>: {what}"), "operator", remedy)
        for number, (what, remedy) in sorted(faults._REMEDIES.items())  # noqa: SLF001
    ]
    passing = sorted(faults._ERRNO_PASSES)  # noqa: SLF001
    said = [(errno.errorcode[n], os.strerror(n), "transient (`storage`)", "") for n in passing]
    yield table(("errno", "message", "kind", "remedy"), [*rows, *said])


def _code(text: str) -> str:
    """Return a text as inline code, with Markdown's special characters made harmless."""
    if not text:
        return ""
    shown = " ".join(text.split()).replace("|", "/" if "`" in text else "|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"
