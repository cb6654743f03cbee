"""Keeps the names of a job's tables in a catalog: they appear and go with their tables.

A name is ours if it is that of the Delta table at the table's own path. A table whose name is taken
by another one stops. A fault of the catalog stops nothing: rows are moved all the same, and the
names are tried again with a later batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from ingestd.model.catalog_names import catalog_name
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.schema import TableId
from spark_jobs.catalog.descriptions import CatalogDescription
from spark_jobs.catalog.entries import CatalogSchema
from spark_jobs.delta_log.commits import settings, signed
from spark_jobs.delta_log.faults import SPARK_ERRORS
from spark_jobs.delta_log.statements import AS_WRITTEN
from spark_jobs.spark_errors import meaning_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.lake.definitions import Definition
    from ingestd.model.errors import IngestdError
    from spark_jobs.catalog.entries import CatalogEntry
    from spark_jobs.catalog.schema_name import SchemaName
    from spark_jobs.delta_log.commits import Signature

_RETRY_S = 60.0
"""How long after a fault the catalog is not asked again: it must not delay the rows."""


@dataclass(slots=True)
class CatalogNames:
    """The names of a job's tables of a source; without a `schema`, it names none.

    May be called from several threads. `fault`: the newest fault of the catalog; None once it has
    answered again.
    """

    schema: CatalogSchema | None = None
    source: str = ""
    job: str = ""
    fault: IngestdError | None = None
    _described: dict[str, CatalogDescription] = field(default_factory=dict, init=False)
    _free: set[str] = field(default_factory=set, init=False)
    _removed: set[str] = field(default_factory=set, init=False)
    _retry_at: float = field(default=0.0, init=False)
    _is_made: bool = field(default=False, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def open(self) -> None:
        """Create the schema. Raises OperatorError if the session does not have its catalog."""
        with self._asking():
            pass

    def lacks(self, table: str, definition: Definition) -> bool:
        """Return whether a table must be named or described, and the catalog may be asked."""
        if self.schema is None or time.monotonic() < self._retry_at:
            return False
        return self._described.get(table) != self._description(definition)

    def ensure_free(self, table: str, path: str) -> None:
        """Raise TableError if the name of a table is that of another one."""
        with self._asking() as schema:
            if schema is None or table in self._free:
                return
            entry = schema.find(_name(table))
            if entry is not None and not entry.is_at(path):
                what, remedy = taken(schema, _name(table), entry, path)
                raise TableError(TableId.parse(table), what, remedy=remedy)
            self._free.add(table)

    def register(self, table: str, path: str, definition: Definition, signature: Signature) -> None:
        """Name and describe a table that `ensure_free` was called for. Idempotent.

        `signature`: of the table's last commit.
        """
        with self._asking() as schema:
            if schema is None or table not in self._free:
                return
            session, wanted = schema.session, self._description(definition)
            if self._described.get(table) == wanted:
                with signed(session, signature, None):
                    wanted.apply_to_columns(session, path)  # lost if the table was re-created
                return
            wanted.apply(session, path, signature)
            schema.add(_name(table), path, wanted.comment)
            self._described[table] = wanted
            self._removed.discard(table)

    def register_log(self, name: str, path: str) -> None:
        """Name a table of the job itself, if it exists: its log of cuts, or a report."""
        with self._asking() as schema:
            if schema is None or not schema.has_table(path):
                return
            entry = schema.find(name)
            if entry is None:
                comment = f"Written by ingestd's {self.job} job of source {self.source}"
                schema.add(name, path, comment)
            elif not entry.is_at(path):
                what, remedy = taken(schema, name, entry, path)
                self._failed(OperatorError(what, remedy=remedy))

    def remove(self, table: str, path: str) -> None:
        """Remove the name of a table that the source no longer has, if it is ours."""
        with self._asking() as schema:
            if schema is None or table in self._removed:
                return
            entry = schema.find(_name(table))
            # (DROP TABLE would delete the rows of a managed table)
            if entry is not None and entry.is_at(path) and entry.kind != "MANAGED":
                schema.drop(_name(table))
                self._log.info("catalog.removed", table=table, name=_name(table))
            self._described.pop(table, None)
            self._free.discard(table)
            self._removed.add(table)

    @contextmanager
    def _asking(self) -> Iterator[CatalogSchema | None]:
        """Yield the schema, made; None if the catalog must not be asked now. Keep its faults."""
        with self._lock:
            schema = self.schema if time.monotonic() >= self._retry_at else None
            if schema is not None and not self._is_made:
                with self._keeping_faults(schema):
                    schema.ensure()
                    self._is_made = True
            if schema is None or not self._is_made:
                yield None
                return
            with self._keeping_faults(schema):
                yield schema

    @contextmanager
    def _keeping_faults(self, schema: CatalogSchema) -> Iterator[None]:
        try:
            with settings(schema.session, AS_WRITTEN):
                yield
        except SPARK_ERRORS as error:
            self._retry_at = time.monotonic() + _RETRY_S
            meaning = meaning_of(error)
            place = f"a schema and tables in {schema.name}"
            remedy = meaning.remedy or f"see that the job's user may create {place}"
            meaning.what = f"the catalog of {schema.name}: {meaning.what}"
            meaning.remedy = f"{remedy}. Tables without a name are complete at their paths"
            self._failed(meaning)
        else:
            if self._retry_at:
                self._log.info("catalog.reached", schema=str(schema.name))
                self.fault, self._retry_at = None, 0.0

    def _failed(self, fault: IngestdError) -> None:
        if self.fault is None:
            self._log.error("catalog.failed", reason=fault.what, remedy=fault.remedy)
        self.fault = fault

    def _description(self, definition: Definition) -> CatalogDescription:
        return CatalogDescription.of(definition, self.source, self.job)

    @property
    def _log(self) -> structlog.stdlib.BoundLogger:
        log: structlog.stdlib.BoundLogger = structlog.get_logger("ingestd")
        return log.bind(source=self.source)


def taken(schema: CatalogSchema, name: str, entry: CatalogEntry, path: str) -> tuple[str, str]:
    """Return what to say, and what to do, about a name that is not the one of a path."""
    named = schema.name.table(name)
    what = "VIEW" if entry.kind == "VIEW" else "TABLE"
    return (
        f"{named} in the catalog is {entry}, not the table at {path}",
        f"DROP {what} {named}, if it is no longer needed; or give --catalog another schema",
    )


def names_in(
    session: SparkSession, schema: SchemaName | None, source: str, job: str
) -> CatalogNames:
    """Return the names of a job's tables in a schema of the session's catalogs, if it has one."""
    return CatalogNames(None if schema is None else CatalogSchema(session, schema), source, job)


def _name(table: str) -> str:
    return catalog_name(TableId.parse(table))
