"""Finds the table to read, with its settings in the config."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import psycopg
from psycopg.conninfo import make_conninfo
from pydantic import BaseModel, SecretStr

from ingestd.app.connectors import FACTORIES
from ingestd.config import SourceSettings, load_config
from ingestd.model.errors import ConfigError, IngestdError, TableError, did_you_mean_table
from ingestd.model.schema import Table, TableId
from ingestd.ports import Connector, Refused
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.settings import SETTINGS
from ingestd.postgres.snapshot.where import check_condition, joined
from spark_jobs.source.options import SourceOptions

APPLICATION_NAME = "ingestd spark"
READER_BYTES = 64 << 20
"""What a task reads ahead with. `ingestd.model.row_checks.row_limit_bytes` is its largest row."""
_WATCHED = {
    "tcp_keepalives_idle": 30,
    "tcp_keepalives_interval": 10,
    "tcp_keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""Settings of the server's side. Unix sockets don't need them: they report a dead peer at once."""


@dataclass(frozen=True, slots=True, repr=False)
class SourceTable:
    """A table and its source, for another process. Picklable; contains the DSN, so `repr` hides it.

    The row filter of `table` includes the requested condition.
    """

    source: str
    kind: str
    settings: BaseModel
    table: Table

    def connector(self) -> Connector:
        """Return a new connector, which the caller closes."""
        return FACTORIES[self.kind].create(self.source, self.settings, memory_bytes=READER_BYTES)

    def __repr__(self) -> str:
        return f"SourceTable({self.source}, {self.table.id})"


async def find_table(options: SourceOptions) -> SourceTable:
    """Return the table, read from the source's catalog, with columns omitted and masked by config.

    A table that can be read but not captured is accepted. Raises ConfigError, OperatorError,
    TransientError, TableError.
    """
    settings = _settings(options)
    asked = options.table
    if not settings.includes(asked.schema, asked.name):
        await _refuse_unasked(options, settings)
    # Describe only this table: the others need not be checked against it.
    only = [f"{_quoted(asked.schema)}.{_literally(asked.name)}"]
    sections = {text: s for text, s in settings.table.items() if TableId.parse(text) == asked}
    dsn = SecretStr(_watched(settings.dsn.get_secret_value()))
    update = {"tables": only, "table": sections, "dsn": dsn}
    settings = settings.model_copy(update=update)
    connector = FACTORIES[settings.kind].create(options.source, settings, memory_bytes=0)
    try:
        table = await _described(connector, asked)
    finally:
        await connector.close()
    if options.where is not None:
        dsn_text = settings.dsn.get_secret_value()
        try:
            await check_condition(dsn_text, [table], options.where)
        except psycopg.Error as error:
            raise classify(error, f"source {options.source}", dsn_text) from error
        conditions = [table.row_filter, options.where] if table.row_filter else [options.where]
        table = replace(table, row_filter=joined(conditions))
    # The keeper checks that the table is still as described, for all kinds of tables.
    table = replace(table, fingerprint="")
    return SourceTable(options.source, settings.kind, settings, table)


async def _described(connector: Connector, asked: TableId) -> Table:
    coverage = await connector.coverage({})
    for table in coverage.tables:
        if table.id == asked:
            return table
    for refused in coverage.refused:
        if refused.table.id == asked:
            return await _read_anyway(connector, refused)
    raise await _absent(connector, asked)


def _settings(options: SourceOptions) -> SourceSettings:
    config = load_config(options.config, SETTINGS, os.environ)
    settings = config.sources.get(options.source)
    if settings is not None:
        return settings
    there = ", ".join(sorted(config.sources))
    raise ConfigError(
        f"option source: {options.config} has no source {options.source!r}",
        remedy=f"it has {there}",
    )


async def _read_anyway(connector: Connector, refused: Refused) -> Table:
    """Return a table that can be read but not streamed, such as one without a replica identity.

    Raises the error of the refusal if the table could not even be described.
    """
    if refused.table.columns:
        return refused.table
    if refused.table.oid == 0:
        raise await _absent(connector, refused.table.id)
    raise refused.error


async def _absent(connector: Connector, asked: TableId) -> IngestdError:
    there = [info.id for info in await connector.metadata().tables()]
    hint = did_you_mean_table(asked, there)
    return TableError(
        asked,
        "does not exist in the database",
        remedy=f"{hint}names are schema.table as in the catalog",
    )


async def _refuse_unasked(options: SourceOptions, settings: SourceSettings) -> None:
    """Raise ConfigError if the config excludes the table, TableError if it does not exist."""
    asked = options.table
    connector = FACTORIES[settings.kind].create(options.source, settings, memory_bytes=0)
    try:
        infos = [info.id for info in await connector.metadata().tables()]
    finally:
        await connector.close()
    included = [i for i in infos if settings.includes(i.schema, i.name)]
    hint = "" if asked in infos else did_you_mean_table(asked, included)
    raise ConfigError(
        f"option table: `tables` of sources.{options.source} does not include {asked}",
        remedy=f"{hint}only tables of the config are read: add it to `tables`",
    )


def _literally(name: str) -> str:
    """Return a pattern that matches only this name."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


def _quoted(schema: str) -> str:
    return '"' + _literally(schema).replace('"', '""') + '"'


def _watched(dsn: str) -> str:
    """Return the DSN with settings by which the server soon detects a reader's dead machine."""
    parameters = read_dsn(dsn)
    own = parameters.get("options") or os.environ.get("PGOPTIONS", "")
    pinned = " ".join(f"-c {name}={value}" for name, value in _WATCHED.items())
    name = parameters.get("application_name") or APPLICATION_NAME
    return make_conninfo(dsn, options=f"{pinned} {own}".strip(), application_name=name)
