"""What happens to the names of a schema in a catalog. One rule for all kinds of catalogs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from ingestd.model.catalog_table import CatalogListing, CatalogTable
from ingestd.model.errors import IngestdError, OperatorError, TransientError

MOST_IN_A_ROW = 3
_Action = Callable[[], "NameOutcome | None"]


class NameOutcome(StrEnum):
    """What happened to a name."""

    CREATED = "created"
    UPDATED = "updated"
    UNCHANGED = "unchanged"
    REMOVED = "removed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class NameReport:
    """The outcome of one name. `name`: with its schema. `fault`: of a failed one."""

    name: str
    outcome: NameOutcome
    fault: IngestdError | None = None


class CatalogSession(Protocol):
    """One schema of a catalog, while it is used. All methods block and may be repeated.

    They raise OperatorError and TransientError.
    """

    @property
    def schema(self) -> str:
        """The schema's full name, for messages."""
        ...

    def ensure_schema(self) -> None:
        """Create the schema unless it exists."""
        ...

    def location_of(self, name: str) -> str | None:
        """Return the location of a table; "" if it has none, None without a table."""
        ...

    def create_table(self, table: CatalogTable) -> None:
        """Create an external Delta table at its location."""
        ...

    def update_table(self, table: CatalogTable) -> bool:
        """Bring columns, comments and properties up to date; return whether they differed."""
        ...

    def drop_table(self, name: str) -> None:
        """Remove a name. The files stay."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


def register_all(session: CatalogSession, listing: CatalogListing) -> Iterator[NameReport]:
    """Bring the names of a schema to a listing; yield each outcome.

    Only names at the lake's own locations are changed or removed. A fault of one name is reported
    and does not concern the others. Raise TransientError and OperatorError if the catalog can't be
    used at all: also if it did not answer for MOST_IN_A_ROW names, or for any.
    """
    session.ensure_schema()
    silent = _Silence(min(MOST_IN_A_ROW, len(listing.tables) + len(listing.dropped)))
    for name, fault in listing.faults.items():
        yield NameReport(f"{session.schema}.{name}", NameOutcome.FAILED, fault)
    for table in listing.tables:
        yield from _reported(session, table.name, partial(_put, session, table), silent)
    for name, location in listing.dropped.items():
        yield from _reported(session, name, partial(_remove, session, name, location), silent)


def faults_of(reports: Iterable[NameReport]) -> Sequence[IngestdError]:
    """Return the faults of the names that failed."""
    return [report.fault for report in reports if report.fault is not None]


@dataclass(slots=True)
class _Silence:
    """For how many names in a row the catalog did not answer, and may not."""

    most: int
    names: int = 0


def _reported(
    session: CatalogSession, name: str, act: _Action, silent: _Silence
) -> Iterator[NameReport]:
    full = f"{session.schema}.{name}"
    try:
        outcome = act()
    except TransientError as error:
        silent.names += 1
        if silent.names >= silent.most:
            raise
        yield NameReport(full, NameOutcome.FAILED, error)
    except OperatorError as error:
        silent.names = 0
        yield NameReport(full, NameOutcome.FAILED, error)
    else:
        silent.names = 0
        if outcome is not None:
            yield NameReport(full, outcome)


def _put(session: CatalogSession, table: CatalogTable) -> NameOutcome:
    found = session.location_of(table.name)
    if found is None:
        session.create_table(table)
        return NameOutcome.CREATED
    if not is_same_location(found, table.location):
        full = f"{session.schema}.{table.name}"
        raise OperatorError(
            f"{full} in the catalog is at {found or 'no location'}, not at {table.location}",
            remedy=f"drop {full} in the catalog if it is no longer needed, or set another"
            " [catalog] schema_name",
        )
    return NameOutcome.UPDATED if session.update_table(table) else NameOutcome.UNCHANGED


def _remove(session: CatalogSession, name: str, location: str) -> NameOutcome | None:
    found = session.location_of(name)
    if found is None or not is_same_location(found, location):
        return None
    session.drop_table(name)
    return NameOutcome.REMOVED


def is_same_location(one: str, other: str) -> bool:
    """Return whether two URIs are the same folder: catalogs write file:/a for file:///a."""
    return _plain(one) == _plain(other)


def _plain(uri: str) -> str:
    scheme, separator, rest = uri.partition(":")
    if not separator:
        return f"file:{uri}".rstrip("/")
    if scheme == "file":
        return f"file:/{rest.lstrip('/')}".rstrip("/")
    same = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    return f"{same}:{rest}".rstrip("/")
