"""What `ingestd tables` finds out, from fakes of the ports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest
from pydantic import SecretStr

from ingestd.app.table_report import (
    SourceReport,
    StatesByTable,
    report_tables,
    report_to_json,
    require_schema,
)
from ingestd.config import SourceSettings
from ingestd.model.errors import (
    ConfigError,
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.schema import Column, Mask, Table, TableId
from ingestd.ports import ColumnInfo, Coverage, Refused, TableInfo
from ingestd.testing.fakes.tables import FakeMetadata

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ingestd.ports import Connector, Metadata, Sink

ORDERS, BAD, AUDIT, OTHER, GONE = (
    TableId("public", "orders"),
    TableId("public", "bad"),
    TableId("public", "audit_x"),
    TableId("app", "other"),
    TableId("public", "gone"),
)
SETTINGS = SourceSettings(
    kind="", dsn=SecretStr("-"), tables=["public.*", "!public.audit_*", "public.gone"]
)


def info(table: TableId) -> TableInfo:
    columns = (
        ColumnInfo("id", "bigint", False, "the number", 0.0, 7.0),  # noqa: FBT003
        ColumnInfo("email", "text", True, None, 0.5, None),  # noqa: FBT003
        ColumnInfo("note", "text", True, None, None, None),  # noqa: FBT003
    )
    return TableInfo(table, columns, ("id",), "d", "what was bought", 7, 8192)


CAPTURED = Table(
    ORDERS,
    1,
    (
        Column("id", 20, -1, pa.int64(), identity=True, nullable=False),
        Column("email", 25, -1, pa.string(), stored_as="email__v2", mask=Mask("sha256")),
    ),
    key=("id",),
)
REFUSED = Refused(Table(BAD, 2, ()), TableError(BAD, "no identity", remedy="add a key"))
MISSING = Refused(Table(GONE, 0, ()), TableError(GONE, "does not exist", remedy="correct it"))


class Shop:
    """A connector and a sink; whatever is an error is raised."""

    def __init__(
        self,
        coverage: Coverage | IngestdError,
        lake: Mapping[TableId, RegisteredTable] | IngestdError,
    ) -> None:
        self._coverage = coverage
        self._lake = lake
        self.known: list[TableId] = []
        self.catalog = FakeMetadata([info(t) for t in (ORDERS, BAD, AUDIT, OTHER)], timeout_s=0.01)

    def metadata(self, timeout_s: float = 10.0) -> Metadata:
        assert timeout_s == 3.0
        return self.catalog

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = 10.0
    ) -> Coverage:
        assert timeout_s == 3.0
        self.known = list(known)
        if isinstance(self._coverage, IngestdError):
            raise self._coverage
        return self._coverage

    async def open(self) -> LakeState:
        if isinstance(self._lake, IngestdError):
            raise self._lake
        return LakeState(tables=self._lake)


COVERAGE = Coverage((CAPTURED,), (REFUSED, MISSING))


def shop(
    coverage: Coverage | IngestdError = COVERAGE,
    lake: Mapping[TableId, RegisteredTable] | IngestdError | None = None,
) -> Shop:
    return Shop(coverage, {} if lake is None else lake)


async def report(
    of: Shop, *, schema: str | None = None, told: StatesByTable | None = None
) -> SourceReport:
    return await report_tables(
        "shop",
        cast("Connector", of),
        cast("Sink", of),
        SETTINGS,
        schema=schema,
        running=told,
        timeout_s=3.0,
    )


def verdicts(found: SourceReport) -> dict[str, tuple[Any, ...]]:
    names = ("captured", "state", "reason", "remedy")
    return {t["table"]: tuple(t[name] for name in names) for t in found.tables}


def registered(state: TableState, reason: str | None = None) -> dict[TableId, RegisteredTable]:
    return {ORDERS: RegisteredTable(ORDERS, 1, 1, state, reason, None)}


async def test_every_table_is_captured_or_says_why_not() -> None:
    found = await report(shop())
    assert found.faults == []
    assert found.schemas == ["app", "public"]
    assert verdicts(found) == {
        "app.other": (False, None, "not matched by `tables`", None),
        "public.audit_x": (False, None, "excluded by '!public.audit_*' in `tables`", None),
        "public.bad": (False, None, "no identity", "add a key"),
        "public.orders": (True, None, None, None),
        "public.gone": (False, None, "does not exist", "correct it"),
    }


async def test_a_table_is_reported_completely() -> None:
    [bad, orders] = (await report(shop(), schema="public")).tables[1:3]
    columns = orders["columns"]
    assert {name: orders[name] for name in orders if name != "columns"} == {
        "table": "public.orders",
        "schema": "public",
        "name": "orders",
        "comment": "what was bought",
        "rows": 7,
        "bytes": 8192,
        "key": ["id"],
        "replica_identity": "default",
        "identity": ["id"],
        "captured": True,
        "state": None,
        "snapshot_progress": None,
        "reason": None,
        "remedy": None,
        "reference": "off",
    }
    assert columns[0] == {
        "name": "id",
        "type": "bigint",
        "nullable": False,
        "comment": "the number",
        "null_fraction": 0.0,
        "distinct": 7.0,
        "lake_name": "id",
        "lake_type": "long",
        "mask": None,
    }
    lake = [(c["lake_name"], c["lake_type"], c["mask"]) for c in columns[1:]]
    assert lake == [("email__v2", "string", "sha256"), (None, None, None)]
    assert {c["lake_name"] for c in bad["columns"]} == {None}


async def test_a_schema_leaves_the_others_out() -> None:
    assert list(verdicts(await report(shop(), schema="app"))) == ["app.other"]


@pytest.mark.parametrize(
    ("state", "captured"),
    [
        (TableState.LIVE, (True, "live", None, None)),
        (TableState.SNAPSHOTTING, (True, "snapshotting", None, None)),
        (
            TableState.DROPPED,
            (True, None, None, None),
        ),  # it exists again, and has not been read yet
    ],
)
async def test_without_a_daemon_the_lake_tells_the_states(
    state: TableState, captured: tuple[Any, ...]
) -> None:
    asked = shop(lake=registered(state))
    assert verdicts(await report(asked))["public.orders"] == captured
    assert asked.known == [ORDERS]


async def test_a_stopped_table_is_not_captured() -> None:
    found = await report(shop(lake=registered(TableState.STOPPED, "a name too long")))
    captured, state, reason, remedy = verdicts(found)["public.orders"]
    assert (captured, state, reason) == (False, "stopped", "a name too long")
    assert remedy.endswith("ingestd snapshot shop public.orders")


async def test_a_running_daemon_knows_better_than_the_lake() -> None:
    told = {"public.orders": {"state": "stopped", "reason": "full", "remedy": "make room"}}
    found = await report(shop(lake=registered(TableState.LIVE)), told=told)
    assert verdicts(found)["public.orders"] == (False, "stopped", "full", "make room")
    reading = {"public.orders": {"state": "snapshotting", "snapshot_progress": 0.5}}
    found = await report(shop(lake=registered(TableState.STOPPED, "x")), told=reading)
    assert verdicts(found)["public.orders"] == (True, "snapshotting", None, None)
    assert found.tables[3]["snapshot_progress"] == 0.5
    found = await report(shop(lake=registered(TableState.STOPPED, "x")), told={})
    assert verdicts(found)["public.orders"] == (True, None, None, None)


async def test_a_source_fault_is_the_reason_of_its_captured_tables() -> None:
    fault = OperatorError("wal_level is replica", remedy="ALTER SYSTEM ...")
    found = await report(shop(Coverage((CAPTURED,), (REFUSED,), (fault,))))
    assert found.faults == []
    told = verdicts(found)
    assert told["public.orders"] == (False, None, "wal_level is replica", "ALTER SYSTEM ...")
    assert told["public.bad"][2] == "no identity"
    assert told["app.other"][2] == "not matched by `tables`"


async def test_tables_are_shown_where_it_is_not_known_what_is_captured() -> None:
    lost = TransientError("lost", reason="connection")
    found = await report(shop(lost))
    assert found.faults == [lost]
    told = verdicts(found)
    assert told["public.orders"] == (None, None, "could not be determined", None)
    assert told["public.audit_x"][0] is False


async def test_a_lake_that_cannot_be_read_is_a_fault_beside_the_tables() -> None:
    full = OperatorError("no such bucket")
    found = await report(shop(lake=full))
    assert found.faults == [full]
    assert verdicts(found)["public.orders"] == (True, None, None, None)


async def test_a_database_that_gives_no_answer_is_one_fault() -> None:
    asked = shop()
    asked.catalog.answers.clear()
    found = await report(asked)
    [fault] = found.faults
    assert isinstance(fault, TransientError)
    assert (found.tables, found.schemas) == ((), ())
    document = report_to_json({"shop": found})
    assert document["sources"]["shop"]["faults"] == [{"what": fault.what, "remedy": fault.remedy}]


def test_an_unknown_schema_is_refused_if_all_were_asked() -> None:
    public, silent = SourceReport(["public"]), SourceReport(faults=[OperatorError("x")])
    require_schema({"a": public, "b": SourceReport(["app"])}, "app")
    require_schema({"a": public, "b": silent}, "app")
    with pytest.raises(ConfigError, match="'ap'; there is app, public"):
        require_schema({"a": public, "b": SourceReport(["app"])}, "ap")
