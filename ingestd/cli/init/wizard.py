"""The dialog of `ingestd init`: from a connection string to a config for `ingestd run`."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ingestd.cli.init.config_text import FirstConfig, LeftOut
from ingestd.cli.init.cursor_columns import ProposedCursor, proposed_cursors
from ingestd.cli.init.dsn import GivenDsn, given_dsn
from ingestd.cli.init.proposal import Database, Proposal, look_at, pattern_of, propose
from ingestd.config import load_config
from ingestd.config.redaction import Redactor
from ingestd.model.errors import ConfigError, IngestdError, OperatorError
from ingestd.postgres.role_sql import least_privilege
from ingestd.postgres.settings import SETTINGS
from ingestd.process import file_creation as creating
from ingestd.terminal.echo import echo
from ingestd.terminal.tables import print_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

_SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,54}\Z")
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9_]+")
_NO_PASSWORD = "no password supplied"  # noqa: S105 - libpq's words
_WHERE = "the database"
_LESS_THE_UMASK = 0o666


@dataclass(frozen=True, slots=True)
class InitCommand:
    """The options; None: prompt for it, or use a default with `takes_defaults`.

    `role`: the role in the SQL that is printed. `replaces`: existing files may be overwritten.
    """

    source: str | None
    dsn: str | None
    lake: str | None
    patterns: Sequence[str]
    kind: str | None
    role: str
    output: Path
    takes_defaults: bool
    replaces: bool

    def do(self) -> None:
        """Prompt, inspect the database, write the config, print the next steps.

        Raises IngestdError.
        """
        self._refuse_to_replace(self.output)
        given, database = self._reached()
        echo(f"connected: PostgreSQL {database.server}, role {database.role}")
        source = self._asked(self.source, "Name of the source", _name_of(database.name))
        if not _SOURCE_NAME.match(source):
            raise ConfigError(f"{source!r}: a source's name is 1-55 of a-z, 0-9 and _")
        secret = given.secret_path(source)
        if secret is not None:
            self._refuse_to_replace(secret)
        patterns = list(self.patterns) or self._asked_patterns(database)
        proposal = asyncio.run(propose(source, given.value, patterns, database, self.kind))
        print_tables(proposal.document, columns=False)
        _print_way(proposal)
        lake = self._asked(self.lake, "Where the Delta tables go", "./lake")
        text = _config(proposal, source, lake, given, database).text()
        self._write(text, secret, given)
        self._print_rights(proposal, source, database)
        _print_next(proposal, self.output)

    def _refuse_to_replace(self, path: Path) -> None:
        if os.path.lexists(path) and not self.replaces:  # a dangling link as well
            raise ConfigError(
                f"{path} exists already", remedy="give --output FILE, or --force to replace it"
            )

    def _asked(self, given: str | None, question: str, default: str) -> str:
        if given is not None:
            return given
        return default if self.takes_defaults else str(typer.prompt(question, default=default))

    def _reached(self) -> tuple[GivenDsn, Database]:
        """Connect; prompt for the password if only that is missing."""
        if self.dsn is None and self.takes_defaults:
            raise ConfigError("--dsn is required with --yes")
        text = self.dsn or typer.prompt(
            "Connection string (postgresql://user@host:5432/dbname, or env:NAME)"
        )
        given = given_dsn(text, self.output.parent, os.environ)
        try:
            return given, _inspect(given)
        except OperatorError as error:
            if _NO_PASSWORD not in error.what or self.takes_defaults or given.is_reference:
                raise
        given = given.with_password(typer.prompt("Password", hide_input=True))
        return given, _inspect(given)

    def _asked_patterns(self, database: Database) -> list[str]:
        found = database.patterns
        if self.takes_defaults:
            return found
        echo(f"found {len(database.tables)} tables")
        text = typer.prompt(
            "Tables to capture (schema.table, with * and ?; separated by commas; ! excludes)",
            default=", ".join(found),
        )
        return found if text == ", ".join(found) else [p.strip() for p in text.split(",")]

    def _write(self, text: str, secret: Path | None, given: GivenDsn) -> None:
        write = creating.replace if self.replaces else creating.create
        try:
            if secret is not None:
                write(secret, given.value + "\n")
            write(self.output, text, _LESS_THE_UMASK)
        except OSError as error:
            raise OperatorError(f"{error.filename}: can't be written: {error.strerror}") from error
        load_config(self.output, SETTINGS, os.environ)
        echo(f"\nwrote {self.output}")
        if secret is not None:
            echo(f"wrote {secret}, with the password: keep it out of version control")

    def _print_rights(self, proposal: Proposal, source: str, database: Database) -> None:
        """Print the SQL for a least-privilege role, unless the connection uses that role."""
        if database.role == self.role:
            return
        settings, streams = proposal.settings, proposal.way["kind"] == "wal"
        statements = asyncio.run(least_privilege(settings, self.role, proposal.tables, _WHERE))
        echo(
            f"\nSQL for a role that can read these tables and nothing else. Run it once in the\n"
            f"database {database.name}, as a superuser:\n"
        )
        for statement in statements:
            echo(f"  {statement}")
        then = f"Then set its password (in psql: \\password {self.role}), and use the role in `dsn`"
        if streams and proposal.way["manage"]:
            then += f"\nof [sources.{source}], with manage = false"
        echo(f"\n{then}.")


def _inspect(given: GivenDsn) -> Database:
    try:
        return asyncio.run(look_at(given.value, _WHERE))
    except IngestdError as error:
        error.what = Redactor([given.value]).text(error.what)
        raise


def _name_of(database: str) -> str:
    name = _NOT_IN_A_NAME.sub("_", database.lower()).strip("_")[:40]
    return name or "source"


def _print_way(proposal: Proposal) -> None:
    kind = proposal.way["kind"]
    if kind == "polling" and proposal.why_not_wal:
        echo("\ncapture: polling, as the write-ahead log can't be read")
    elif kind == "polling":
        echo("\ncapture: polling")
    else:
        echo("\ncapture: the write-ahead log (logical replication)")
    for line in proposal.why_not_wal or proposal.blockers:
        echo(f"  {line.subject}: {line.detail}")
        if line.remedy:
            echo(f"    remedy: {line.remedy}")
    if kind == "polling" and proposal.why_not_wal:
        echo("  to capture every change, fix this and run init again; see docs/polling.md")


def _config(
    proposal: Proposal, source: str, lake: str, given: GivenDsn, database: Database
) -> FirstConfig:
    way = proposal.way
    left_out = [
        LeftOut(f"!{pattern_of(r.table.id)}", r.error.reason, r.error.remedy)
        for r in proposal.refused
    ]
    plain = FirstConfig(
        source,
        f"database {database.name} (PostgreSQL {database.server})",
        lake,
        given.in_config(source),
        way["kind"],
        way.get("manage"),
        proposal.patterns,
        left_out,
    )
    return replace(
        plain,
        why_not_wal=[(f"{b.subject}: {b.detail}", b.remedy) for b in proposal.why_not_wal],
        table=str(proposal.tables[0]) if proposal.tables else None,
        cursors=_cursors(proposal),
    )


def _cursors(proposal: Proposal) -> Sequence[ProposedCursor]:
    if proposal.way["kind"] != "polling" or not proposal.tables:
        return ()
    return asyncio.run(proposed_cursors(proposal.settings, proposal.tables))


def _print_next(proposal: Proposal, output: Path) -> None:
    path = shlex.quote(str(output))
    echo("\nNext:")
    if proposal.blockers:
        echo("  fix the problems above")
    echo(f"  ingestd check -c {path}")
    echo(f"  ingestd run -c {path}")
    if proposal.way["kind"] == "wal":
        echo(
            "\nTo record DDL in the WAL by event triggers (docs/ddl.md), put"
            f'\nddl_log = "event_trigger" into {output}. The SQL that creates them, for a'
            f"\nsuperuser, is then printed by:\n\n  ingestd check -c {path}"
        )
