"""The table `_epochs`: one row per epoch, and the position reached since (design section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from ingestd.failpoints import lost, reach
from ingestd.lake.delta.append_log import AppendLog, Creation, ReplacedError
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_INTERVAL
from ingestd.lake.delta.log import AcceptTorn
from ingestd.lake.delta.read import read_files
from ingestd.lake.parquet_writer import FragmentWriter
from ingestd.model.changes import CommittedEpoch
from ingestd.model.errors import LakeLostError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TIMESTAMP

SERVER_ID = "ingestd.origin"
"""Table property with the server's system identifier."""

SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("first_lsn", pa.int64()),
        ("end_lsn", pa.int64()),
        ("last_commit_ts", TIMESTAMP),
        ("committed_at", TIMESTAMP),
        ("transactions", pa.int64()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        (
            "tables",
            pa.list_(
                pa.field(
                    "element",
                    pa.struct(
                        [("table", pa.string()), ("version", pa.int64()), ("rows", pa.int64())]
                    ),
                )
            ),
        ),
    ]
)
NEWEST = 32
"""Minimum number of recent epochs whose listed versions are loaded; each may take a file."""
_STATISTICS = ("epoch", "first_lsn", "end_lsn")


class EpochTable:
    """`_epochs`. All calls block; one at a time.

    Its app transaction is the position up to which nothing captured is missing: the end_lsn of the
    last epoch, or a later one recorded by `advance`.
    """

    def __init__(self, log: AppendLog, before_commit: Callable[[str], None]) -> None:
        self._log = log
        self._before_commit = before_commit
        self.last_epoch = 0
        self.end_lsn: Lsn | None = None
        self.position: Lsn | None = None
        self.server_id: str | None = None
        self.newest: dict[str, int] = {}
        """Newest listed version of each table, by "schema.table": as `load` found it in recent
        epochs."""

    @property
    def exists(self) -> bool:
        """Return whether `load` found it or it was created."""
        return self._log.exists

    def listed(self) -> dict[str, int]:
        """Return the newest version of each table that an epoch lists, by "schema.table".

        Reads all epochs.
        """
        if not self._log.exists:
            return {}
        rows = read_files(
            self._log.handle, self._log.store, self._log.folder, columns=["tables"]
        ).to_pylist()
        found: dict[str, int] = {}
        for row in rows:
            for entry in row["tables"] or ():
                found[entry["table"]] = max(entry["version"], found.get(entry["table"], -1))
        return found

    def load(self, accept_torn: AcceptTorn | None = None) -> None:
        """Read the last epoch, position and server id; `accept_torn`: see `TableLog.load`."""
        self._log.load(accept_torn)
        self.last_epoch, self.end_lsn, self.position = 0, None, None
        self.newest = {}
        self.server_id = self._log.configuration().get(SERVER_ID)
        if not self._log.exists:
            return
        self._log.ensure_fields(SCHEMA)
        self._log.ensure_own()
        rows = self._last_rows()
        if rows:
            last = max(rows, key=lambda row: int(row["epoch"]))
            self.last_epoch, self.end_lsn = last["epoch"], Lsn(last["end_lsn"])
            for row in sorted(rows, key=lambda row: int(row["epoch"])):
                self.newest |= {each["table"]: each["version"] for each in row["tables"] or ()}
        version = self._log.app_version()
        known = [p for p in (self.end_lsn, version) if p is not None]
        self.position = Lsn(max(known)) if known else None

    def _last_rows(self) -> list[dict[str, Any]]:
        """Read only the files that may hold one of the newest epochs."""
        newest = 0
        before = NEWEST - 1 if self._log.store.syncs else 0  # in a store each file is a request

        def remember(statistics: Mapping[str, Any]) -> bool:
            nonlocal newest
            newest = max(newest, statistics.get("maxValues", {}).get("epoch") or 0)
            return False

        def may_be_last(statistics: Mapping[str, Any]) -> bool:
            high = statistics.get("maxValues", {}).get("epoch")
            return high is None or high >= newest - before

        for keep in (remember, may_be_last):
            rows = read_files(
                self._log.handle,
                self._log.store,
                self._log.folder,
                columns=["epoch", "end_lsn", "tables"],
                keep=keep,
            )
        found: list[dict[str, Any]] = rows.to_pylist()
        return found

    def adopt(self, server_id: str) -> None:
        """Create the table, and record the server that the rows come from."""
        if self.server_id == server_id:
            return
        reach("sink.adopt.before", lost)
        if not self._log.exists:
            self._log.create(
                Creation(
                    SCHEMA,
                    {
                        "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
                        "delta.dataSkippingStatsColumns": ",".join(_STATISTICS),
                    },
                )
            )
        self._log.set_properties({SERVER_ID: server_id})
        self.server_id = server_id
        reach("sink.adopt.after", lost)

    def append_epoch(self, epoch: CommittedEpoch) -> None:
        """Append an epoch's row, durably."""
        summary = epoch.summary
        row = {
            "epoch": epoch.epoch,
            "first_lsn": int(summary.first_lsn),
            "end_lsn": int(summary.end_lsn),
            "last_commit_ts": summary.last_commit_ts,
            "committed_at": epoch.committed_at,
            "transactions": summary.transactions,
            "rows": sum(t.rows for t in epoch.tables),
            "bytes": summary.nbytes,
            "tables": [
                {"table": str(t.table), "version": t.version, "rows": t.rows} for t in epoch.tables
            ],
        }
        writer = FragmentWriter(self._log.store, self._log.folder, _STATISTICS, makes_folder=False)
        fragments = writer.finish([pa.Table.from_pylist([row], SCHEMA)])
        self._before_commit("_epochs")
        reach("sink.epochs_commit.before", lost)
        self._log.commit_files(fragments, int(summary.end_lsn))
        reach("sink.epochs_commit.after", lost)
        self.last_epoch, self.end_lsn = epoch.epoch, summary.end_lsn
        self.position = max(summary.end_lsn, self.position or summary.end_lsn)

    def ensure_unreplaced(self) -> None:
        """Raise LakeLostError if the table is not the one that was last read or written."""
        try:
            self._log.ensure_unreplaced()
        except ReplacedError as error:
            raise LakeLostError(error.what, remedy=error.remedy) from error

    def ensure_not_taken_over(self) -> None:
        """Raise TransientError or OperatorError if another process has taken over."""
        self._log.ensure_latest()

    def ensure_not_fenced(self) -> None:
        """Make an empty durable commit, which fails if another process has fenced the table."""
        self._log.commit_files([])

    def advance(self, position: Lsn) -> None:
        """Record a later position, durably; do nothing if it is not later."""
        if self.position is not None and position <= self.position:
            return
        self._before_commit("_epochs")
        reach("sink.advance.before", lost)
        self.ensure_unreplaced()
        self._log.commit_files([], int(position))
        reach("sink.advance.after", lost)
        self.position = position
