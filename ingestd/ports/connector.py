"""What a source provides for reading a table at one snapshot, split by split."""

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
    """A column for a person to look at; statistics are the server's estimates, None if none."""

    name: str
    pg_type: str
    nullable: bool
    comment: str | None
    null_fraction: float | None
    distinct: float | None


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table for a person to look at; `rows` and `bytes` are the server's estimates."""

    id: TableId
    columns: tuple[ColumnInfo, ...]
    key: tuple[str, ...]
    replica_identity: str
    comment: str | None
    rows: int | None
    bytes: int | None


class Metadata(Protocol):
    """What is in the database, asked within `timeout_s` (TransientError ``timeout`` beyond it).

    Needs no right but to connect; statistics that the role may not see are None. Waits for nobody
    who holds a table.
    """

    async def schemas(self) -> Sequence[str]:
        """Names of the schemas that hold user tables, sorted."""
        ...

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Tables of a schema, sorted by name; empty for an unknown one. None: of all, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which of the tables that the config asks for are captured as things stand, and which not.

    `tables` as they are captured; `refused` may not be there (oid 0). `faults`: what keeps the
    source from being captured at all.
    """

    tables: Sequence[Table]
    refused: Sequence[Refused]
    faults: Sequence[OperatorError] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """An independent piece of a table at one snapshot; only its `SplitManager` knows `where`.

    Picklable, so that another process can read it.
    """

    table: Table
    snapshot: str
    where: str
    estimated_bytes: int


class SplitManager(Protocol):
    """Cuts tables into splits: together every row once, whatever the number of them."""

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut `table` into splits of about `target_bytes` each; at least one."""
        ...


class PageSource(Protocol):
    """A split's rows as Arrow batches. Always closed; not reusable."""

    @property
    def remaining(self) -> Sequence[Predicate]:
        """Predicates that it was given and does not apply: the reader must.

        Known from the start. The others are applied exactly as the reader would do it.
        """
        ...

    def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Yield the rows: the projected columns, lake names and types, plus `_cdc_raw`.

        Bounded memory.
        """
        ...

    async def close(self) -> None: ...


class Connector(Protocol):
    """One source: everything that can be asked of it. `close` closes all it gave."""

    def metadata(self, timeout_s: float = 10.0) -> Metadata: ...

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = 10.0
    ) -> Coverage:
        """Say which tables are captured, given what the lake has of them. Changes nothing.

        Needs no right but to connect. Raises OperatorError, TransientError (``timeout``).
        """
        ...

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Make a capture. `log`: the lake that its changes go to, for one that looks back."""
        ...

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Return what cuts tables in the way that is read fastest.

        With `resumable` a split has the same rows under a later snapshot too, but for those that
        came, went or changed; the price is slower reading, and one split for each table or
        partition where nothing could be cut like that.
        """
        ...

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Read a split: `columns` None for all, else by the source's names, in this order.

        Rows for which one of the `predicates` is not true are left out, as far as it can be done
        (`PageSource.remaining`). KeyError for a column that the table has not.
        """
        ...

    async def check(self) -> Sequence[CheckLine]:
        """Look for everything that would make a run fail. Changes nothing."""
        ...

    async def demand(self) -> ServerDemand:
        """Return what a run of this source needs of its server, and what the server has left.

        Raises OperatorError, TransientError.
        """
        ...

    async def close(self) -> None: ...


class ConnectorFactory(Protocol):
    """Makes connectors of one kind; found by `kind` in the registry."""

    @property
    def name(self) -> str:
        """The config's `kind`."""
        ...

    @property
    def config_model(self) -> type[BaseModel]:
        """Model of the `[sources.NAME]` section; it refuses unknown keys."""
        ...

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Make a connector whose buffers stay under `memory_bytes`; does no I/O.

        Raises TypeError for another kind's config.
        """
        ...
