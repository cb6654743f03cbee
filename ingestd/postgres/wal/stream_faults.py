"""What an end of the stream means for the next start: retry, re-snapshot, or operator action."""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.postgres.connection.errors import failed_row_at, is_of_a_row, why_unsendable
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.slots.decode_gap import RowSuspects, SlotDecodeGap
from ingestd.postgres.wal.slots.slot import older_slot
from ingestd.postgres.wal.spool import SpoolPolicy

_REREAD = (
    "the server still sends what is in the WAL as it was written. To give up these changes: correct"
    " the row in its table, or exclude its column (`exclude_columns`); then set slot_lost = "
    '"resnapshot" and snapshot = "initial": all tables are re-snapshotted from a new slot'
)

FindSuspects = Callable[[], RowSuspects]
"""Returns the relations that the row may be of."""


class StreamFaults:
    """Judges the errors that end a stream of a source, and records them in its `decode_gap`."""

    def __init__(
        self, source: str, settings: WalSettings, decode_gap: SlotDecodeGap, spool: SpoolPolicy
    ) -> None:
        self._source = source
        self._settings = settings
        self._decode_gap = decode_gap
        self._spool_policy = spool

    def meaning_of(
        self,
        error: IngestdError,
        after: Lsn,
        *,
        streams_in_progress: bool,
        find_suspects: FindSuspects | None = None,
    ) -> IngestdError:
        """Return what this end of the stream means for the next start; else the error itself.

        `after`: the position up to which everything was decoded. `find_suspects`: if the stream
        began with the transaction that failed; may raise ProtocolError.
        """
        cause = error.__cause__
        if isinstance(error, TransientError) and not is_of_a_row(cause):
            return error
        if self._is_of_publication(cause):
            fault = older_slot(
                self._settings.slot, self._settings.publication, f"source {self._source}, stream"
            )
            if not self._settings.manage:
                return fault
            self._decode_gap.lacks_publication = True  # `continuity` reports a gap
            return TransientError(fault.what, reason="publication_lost")
        if streams_in_progress:
            # Servers up to 18 fail at some transactions with DDL and savepoints whenever they send
            # them while open, and not after (could not map filenode ... to relation OID).
            self._spool_policy.is_refused = True
            return TransientError(
                error.what,
                reason="open_transactions",
                remedy="nothing to do: the next connection has transactions sent after they commit",
            )
        if isinstance(cause, psycopg.Error) and is_of_a_row(cause):
            return self._row_error(error, cause, after, find_suspects)
        return error

    def _row_error(
        self,
        error: IngestdError,
        cause: psycopg.Error,
        after: Lsn,
        find_suspects: FindSuspects | None,
    ) -> IngestdError:
        """Return the error of a row that the server can't output, wherever the slot is read.

        The slot can't pass it, so if it fails there repeatedly, its changes are lost: `continuity`
        reports that, and all tables are re-read from a new slot, except those that are kept out
        (`decode_gap`). Only if the config allows it; otherwise the operator decides.
        """
        settings, decode_gap = self._settings, self._decode_gap
        if not (settings.slot_lost == "resnapshot" and settings.snapshot == "initial"):
            return OperatorError(error.what, remedy=_REREAD)
        in_its_table = f"correct it in its table; or {self._skip_row_remedy('its column')}"
        if not settings.manage:
            return OperatorError(error.what, remedy=in_its_table)
        failures = decode_gap.fail(failed_row_at(cause) or str(after), after)
        is_memory = isinstance(cause, psycopg.errors.OutOfMemory)
        if find_suspects is None or failures < (5 if is_memory else 2):
            remedy = "nothing to do: retried; then all tables are re-snapshotted"
            return TransientError(error.what, reason="row_not_sent", remedy=remedy)
        suspects = find_suspects()
        wait_s = decode_gap.wait_s(suspects)
        if wait_s > 0 and not decode_gap.can_keep_out(suspects):
            return OperatorError(error.what, remedy=in_its_table)
        if wait_s > 0:
            remedy = (
                f"nothing to do: in {wait_s / 60:.0f} min all tables are re-snapshotted. To prevent"
                " that, find the role that writes such rows by the tables that are stopped, and "
                "revoke its right to write them"
            )
            return TransientError(error.what, reason="row_not_sent", remedy=remedy)
        why = why_unsendable(cause) or loggable_message(cause)
        decode_gap.undecodable = f"slot {settings.slot!r} can't pass a row: {why}"
        decode_gap.keep_out(suspects, why)
        return TransientError(error.what, reason="row_not_sent")

    def _is_of_publication(self, fault: BaseException | None) -> bool:
        if not isinstance(fault, psycopg.errors.UndefinedObject):
            return False
        return f'"{self._settings.publication}"' in (fault.diag.message_primary or "")

    def _skip_row_remedy(self, what: str) -> str:
        """Return how to get past a row that can't be sent: its table is not known here."""
        return (
            f"exclude {what} (`exclude_columns`), or its table. The server still "
            "sends what is in the WAL as it was written, so then: stop ingestd, SELECT "
            "pg_catalog.pg_drop_replication_slot("
            f"'{self._settings.slot}'); and start it: all tables are re-snapshotted"
        )
