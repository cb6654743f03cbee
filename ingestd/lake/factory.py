"""The factory of Delta lakes (ports.LakeFactory)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ingestd.config import LakeSettings, MaintenanceSettings
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.lake.pause_mark import LakePauseMark
from ingestd.lake.reference.source import RawReferenceSource
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.lake.store.errors import table_fault
from ingestd.lake.store.pending_calls import PATIENCE_S, StorageCalls
from ingestd.lake.store.store import Store, open_store
from ingestd.lake.table_folders import raw_tables
from ingestd.model.catalog_table import CatalogListing
from ingestd.model.check import CheckLine
from ingestd.model.errors import FolderError
from ingestd.model.memory_shares import EPOCH_BUFFER, REFERENCE_BUFFER, REFERENCE_FOLD, bytes_of
from ingestd.model.schema import TableId
from ingestd.ports import (
    LakeMaintenance,
    PauseMark,
    ReferenceSink,
    ReferenceTableSource,
    Sink,
    StorageWait,
)
from ingestd.ports.verify import VerifiedLake
from ingestd.process.memory import Trimming


class DeltaLakeFactory:
    """See `ingestd.ports.LakeFactory`. `limit_bytes`: `limits.memory`, for the whole process.

    `storage_patience_s`: a call to the storage that takes longer is reported. What only a command
    needs is imported when it is used.
    """

    def __init__(
        self,
        settings: LakeSettings,
        limit_bytes: int,
        *,
        storage_patience_s: float = PATIENCE_S,
    ) -> None:
        self._storage_patience_s = storage_patience_s
        self._uri = settings.uri
        options = {k: v.get_secret_value() for k, v in settings.storage_options.items()}
        self._storage_options = options or None
        self._trimming = Trimming(limit_bytes)
        self._writers: dict[str, WriterIdentity] = {}
        self._calls: dict[str, StorageCalls] = {}

    def check(self) -> Sequence[CheckLine]:
        """Commit in the lake's folder; then read the lake's id."""
        from ingestd.lake.check import check_lake_id, probe  # noqa: PLC0415

        line = probe(self._uri, self._storage_options)
        id_line = None if line.level == "fail" else check_lake_id(self._uri, self._storage_options)
        return [line] if id_line is None else [line, id_line]

    async def check_writer(self, source: str, claim: str) -> CheckLine | None:
        """Compare the newest commit of `_epochs`."""
        from ingestd.lake.check import check_writer  # noqa: PLC0415

        return await check_writer(self._lake(source, WriterIdentity(claim), 0), source)

    def place(self, source: str, table: TableId | None = None) -> str:
        """Return the folder."""
        layout = Layout(source)
        folder = layout.root if table is None else layout.raw(table)
        return f"{self._uri.rstrip('/')}/{folder}"

    def sink(self, source: str, claim: str | None = None, *, memory_bytes: int = 0) -> Sink:
        """Build the raw tables, `_epochs` and `_tables`."""
        if claim is None:
            return self._lake(source, None, memory_bytes)
        writer = self._writers.get(source)
        if writer is None or writer.claim != claim:
            writer = self._writers[source] = WriterIdentity(claim)
        return self._lake(source, writer, memory_bytes, is_claimed=True)

    def _lake(
        self,
        source: str,
        writer: WriterIdentity | None,
        memory_bytes: int,
        *,
        is_claimed: bool = False,
    ) -> DeltaLake:
        return DeltaLake(
            self._uri,
            source,
            storage_options=self._storage_options,
            buffer_bytes=bytes_of(EPOCH_BUFFER, memory_bytes),
            trimming=self._trimming,
            writer=writer,
            is_claimed=is_claimed,
            calls=self._calls_of(source),
        )

    def reference_table(
        self, source: str, table: TableId, *, is_claimed: bool = True, memory_bytes: int = 0
    ) -> ReferenceSink:
        """Build the table of current rows."""
        return DeltaReferenceTable(
            self._uri,
            source,
            table,
            storage_options=self._storage_options,
            buffer_bytes=bytes_of(REFERENCE_BUFFER, memory_bytes),
            is_claimed=is_claimed,
            needs_lake_id=True,
            calls=self._calls_of(source),
        )

    def reference_source(
        self, source: str, table: TableId, memory_bytes: int, position: int | None
    ) -> ReferenceTableSource:
        """Build a fold of the raw table."""
        made = RawReferenceSource(
            self._uri,
            source,
            table,
            storage_options=self._storage_options,
            memory_bytes=bytes_of(REFERENCE_FOLD, memory_bytes),
            calls=self._calls_of(source),
        )
        if position is not None:
            made.resume(position)
        return made

    def pause_mark(self, source: str) -> PauseMark:
        """Build the file in the source's folder."""
        return LakePauseMark(
            self._uri,
            source,
            storage_options=self._storage_options,
            needs_lake=True,
            calls=self._calls_of(source),
        )

    def maintenance(
        self, source: str, settings: MaintenanceSettings, references: Collection[TableId]
    ) -> LakeMaintenance:
        """Build the process."""
        return MaintenanceProcess(
            self._uri,
            source,
            MaintenancePolicy(settings.target_bytes, settings.retention),
            storage_options=self._storage_options,
            references=[str(table) for table in references],
        )

    def verified(self, source: str) -> VerifiedLake:
        """Build a reader of the raw tables."""
        from ingestd.lake.verify.lake import DeltaVerifiedLake  # noqa: PLC0415

        return DeltaVerifiedLake(self._uri, source, storage_options=self._storage_options)

    def last_epochs(self, source: str, limit: int) -> Sequence[Mapping[str, Any]]:
        """Read `_epochs`."""
        from ingestd.lake.delta.newest_rows import newest_rows  # noqa: PLC0415

        order = ("epoch", "end_lsn")
        return newest_rows(self._read_store(), Layout(source).epochs, order, limit) or ()

    def last_changes(
        self, source: str, table: TableId, limit: int
    ) -> Sequence[Mapping[str, Any]] | None:
        """Read the raw table."""
        from ingestd.lake.delta.newest_rows import newest_rows  # noqa: PLC0415

        store = self._read_store()
        folder = Layout(source).raw(table)
        try:
            return newest_rows(store, folder, ("_cdc_lsn", "_cdc_seq"), limit)
        except FolderError as error:
            raise table_fault(error, source, table, store.uri(folder)) from error

    def tables(self, source: str) -> Sequence[TableId]:
        """List the folders."""
        return raw_tables(self._read_store(), Layout(source))

    def catalog_listing(self, source: str) -> CatalogListing:
        """Read the schema of each table."""
        from ingestd.lake.catalog_tables import list_for_catalog  # noqa: PLC0415

        return list_for_catalog(self._read_store(), source)

    def _read_store(self) -> Store:
        """Return the store. Raise OperatorError if a newer version has written the lake."""
        store = open_store(self._uri, self._storage_options)
        read_lake_id(store)
        return store

    def waiting(self, source: str, patience_s: float | None = None) -> StorageWait | None:
        """Return the oldest call."""
        calls = self._calls.get(source)
        return None if calls is None else calls.waiting(patience_s)

    def forget(self, source: str) -> None:
        """Forget both."""
        self._writers.pop(source, None)
        self._calls.pop(source, None)

    def _calls_of(self, source: str) -> StorageCalls:
        return self._calls.setdefault(source, StorageCalls(self._storage_patience_s))
