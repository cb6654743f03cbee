"""A rehearsal of a start, by its steps that change nothing: for `ingestd check`.

The lake is opened, the source discovered, and both compared, by the same ports and decisions as in
`Pipeline`. The lake is not fenced, and nothing in the source is created or altered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ingestd.model.check import CheckLine, Level
from ingestd.model.errors import IngestdError, TableError, TransientError
from ingestd.model.lake_state import LakeState
from ingestd.model.schema import TableId
from ingestd.pipeline.known_lake import open_lake
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.startup import refuse_behind, refuse_lost, refuse_missing
from ingestd.ports import ChangeCapture, Lost, Sink


class StartRehearsal:
    """One start of one source.

    `claimed_by`: the session that holds its claim, None if none. `placed`: returns a table's place
    in the lake; raises TableError if it can have none.
    """

    def __init__(
        self,
        source: str,
        capture: ChangeCapture,
        sink: Sink,
        policy: PipelinePolicy,
        *,
        claimed_by: str | None,
        placed: Callable[[TableId], object],
    ) -> None:
        self._source = source
        self._capture = capture
        self._sink = sink
        self._policy = policy
        self._claimed_by = claimed_by
        self._placed = placed
        self._lines: list[CheckLine] = []

    async def lines(self) -> list[CheckLine]:
        """Return a line for everything that would be refused or needs attention."""
        try:
            await self._start()
        except TransientError as error:  # a run would retry
            self._add("start", "warn", self._bare(error.what), error.remedy)
        except IngestdError as error:
            self._add("start", "fail", self._bare(error.what), error.remedy)
        return self._lines

    async def _start(self) -> None:
        policy = self._policy
        committed = await open_lake(self._sink, self._capture)
        for notice in committed.notices:
            self._add("lake", "warn", notice.what, notice.remedy)
        for error in committed.damaged.values():
            self._add(f"table {error.table}", "fail", error.reason, error.remedy)
        refuse_missing(self._source, committed, may_read=policy.may_read)
        # Rewritten rows are not checked: that may require reading a table.
        known = {name: replace(table, fingerprint="") for name, table in committed.tables.items()}
        discovery = await self._capture.discover(known)
        for refused in discovery.refused:
            error = refused.error
            self._add(f"table {refused.table.id}", "fail", error.reason, error.remedy)
        for table in discovery.tables:
            try:
                self._placed(table.id)
            except TableError as error:
                self._add(f"table {table.id}", "fail", error.reason, error.remedy)
        for notice in discovery.notices:
            self._add(notice.event.partition(".")[0], "warn", notice.what, notice.remedy)
        # A running daemon has compared them, and moves both.
        if self._claimed_by is None:
            await self._compare(committed)

    async def _compare(self, committed: LakeState) -> None:
        continuity = await self._capture.continuity(committed)
        if isinstance(continuity, Lost):
            refuse_lost(self._source, continuity, may_read=self._policy.may_read)
            refuse_behind(self._source, continuity)
            self._add(
                "start",
                "warn",
                f"changes may be lost: {continuity.reason}; all tables are re-read",
                "nothing to do if that is intended; the lake's current rows remain until then",
            )

    def _bare(self, what: str) -> str:
        """Return an error's text without the source, which has its own column."""
        return what.removeprefix(f"source {self._source}: ")

    def _add(self, subject: str, level: Level, detail: str, remedy: str | None) -> None:
        self._lines.append(CheckLine(self._source, subject, level, detail, remedy))
