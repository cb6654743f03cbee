"""The port for reading a table at one snapshot, split by split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    import pyarrow as pa
    from pydantic import BaseModel

    from ingestd.model.check import CheckLine
    from ingestd.model.errors import OperatorError
    from ingestd.model.lake_state import RegisteredTable
    from ingestd.model.predicates import Predicate
    from ingestd.model.schema import Table, TableId
    from ingestd.ports.capture import ChangeCapture, Refused
    from ingestd.ports.change_log import ChangeLog
    from ingestd.ports.demand import ServerDemand


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """A column, for display; statistics are the server's estimates, None if there are none."""

    name: str
    pg_type: str
    nullable: bool
    comment: str | None
    null_fraction: float | None
    distinct: float | None


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table, for display; `rows` and `bytes` are the server's estimates."""

    id: TableId
    columns: tuple[ColumnInfo, ...]
    key: tuple[str, ...]
    replica_identity: str
    comment: str | None
    rows: int | None
    bytes: int | None


class Metadata(Protocol):
    """The database's catalog, queried within `timeout_s` (TransientError ``timeout`` beyond it).

    Needs only the right to connect; statistics that the role may not read are None. Never waits for
    a table lock.
    """

    async def schemas(self) -> Sequence[str]:
        """Return the names of the schemas that hold user tables, sorted."""
        ...

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Return a schema's tables by name; empty if it is unknown. None: all tables, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Coverage:
    """The tables that the config asks for, as they are captured now or refused.

    `tables` as they are captured; a table in `refused` may not exist (oid 0). `faults`: what
    prevents the source from being captured at all.
    """

    tables: Sequence[Table]
    refused: Sequence[Refused]
    faults: Sequence[OperatorError] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """An independent part of a table at one snapshot; only its `SplitManager` interprets `where`.

    Picklable, so that another process can read it.
    """

    table: Table
    snapshot: str
    where: str
    estimated_bytes: int


class SplitManager(Protocol):
    """Cuts tables into splits: together they hold every row once, however many there are."""

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut `table` into splits of about `target_bytes` each; at least one."""
        ...


class PageSource(Protocol):
    """A split's rows as Arrow batches. Always close it; not reusable."""

    @property
    def remaining(self) -> Sequence[Predicate]:
        """Predicates that were passed in but are not applied: the reader must apply them.

        Known from the start. All others are applied exactly as the reader would.
        """
        ...

    def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Yield the rows: the projected columns with lake names and types, plus `_cdc_raw`.

        Memory is bounded.
        """
        ...

    async def close(self) -> None: ...


class Connector(Protocol):
    """Everything that one source offers. `close` closes all objects obtained from it."""

    def metadata(self, timeout_s: float = 10.0) -> Metadata: ...

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = 10.0
    ) -> Coverage:
        """Return which tables are captured, given what the lake has of them. Changes nothing.

        Needs only the right to connect. Raises OperatorError, TransientError (``timeout``).
        """
        ...

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Create a capture. `log`: the lake its changes go to, if it compares with earlier ones."""
        ...

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Return a manager that cuts tables in the way that is fastest to read.

        With `resumable` a split holds the same rows under a later snapshot too, except those
        inserted, deleted or changed since. Reading is then slower, and each table or partition that
        can't be cut that way is one split.
        """
        ...

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Return a source of a split's rows. `columns`: source names, in this order; None for all.

        Rows for which one of the `predicates` is not true are omitted where possible
        (`PageSource.remaining`). Raises KeyError for a column that the table does not have.
        """
        ...

    async def check(self) -> Sequence[CheckLine]:
        """Check for everything that would make a run fail. Changes nothing."""
        ...

    async def demand(self) -> ServerDemand:
        """Return what a run of this source needs from its server, and what the server has left.

        Raises OperatorError, TransientError.
        """
        ...

    async def close(self) -> None: ...


class ConnectorFactory(Protocol):
    """Creates connectors of one kind; the registry finds it by `kind`."""

    @property
    def name(self) -> str:
        """The config's `kind`."""
        ...

    @property
    def config_model(self) -> type[BaseModel]:
        """Model of the `[sources.NAME]` section; it rejects unknown keys."""
        ...

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Create a connector whose buffers stay under `memory_bytes`; does no I/O.

        Raises TypeError for another kind's config.
        """
        ...
