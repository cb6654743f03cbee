"""The sessions of one history, which execute its steps."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from tests.harness.databases import Database
    from tests.histories.steps import SessionStatement

SETTINGS = "-c lock_timeout=30ms -c statement_timeout=20s -c allow_system_table_mods=off"
IDLE = psycopg.pq.TransactionStatus.IDLE


@dataclass
class Sessions:
    """Opened as steps need them. The history continues without statements that the server refuses.

    `refused`: the statements, and why.
    """

    database: Database
    prefix: str
    refused: list[str] = field(default_factory=list)
    _open: dict[str, psycopg.Connection[tuple[Any, ...]]] = field(default_factory=dict)

    def execute(self, step: SessionStatement) -> None:
        """Execute a step in its session; a transaction stays open for the next."""
        if step.session not in self._open:
            self._open[step.session] = psycopg.connect(
                self.database.socket_dsn, autocommit=True, options=SETTINGS
            )
        text = step.sql.replace("{h}", self.prefix).replace("{p}", self.database.name)
        try:
            self._open[step.session].execute(text.encode(), prepare=False)
        except psycopg.Error as error:
            self.refused.append(f"{text}: {str(error).splitlines()[0]}")

    @property
    def are_idle(self) -> bool:
        """Whether no transaction is open."""
        return all(c.info.transaction_status is IDLE for c in self._open.values())

    def close(self) -> None:
        """Commit what is open and can be; commit what is prepared."""
        for connection in self._open.values():
            with contextlib.suppress(psycopg.Error):
                connection.execute("COMMIT")
            connection.close()
        self._open.clear()
        ours = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database() AND gid ~ %s"
        with self.database.connect() as connection:
            for (gid,) in connection.execute(ours, [f"^{self.prefix}_"]).fetchall():
                connection.execute(sql.SQL("COMMIT PREPARED {}").format(sql.Literal(gid)))
