"""Commits of others in a log, as they come between ours: which are refused, and why (I5)."""

from __future__ import annotations

import pyarrow as pa

from ingestd.lake.delta.commit import Commit, CommitAuthor
from ingestd.lake.delta.log import TableLog, arrow_schema
from ingestd.lake.fencing import WriterIdentity
from ingestd.model.errors import FolderError, OperatorError, TransientError


class AppendedByAnotherError(OperatorError):
    """Another writer appended since the log was read."""


class ForeignCommitError(AppendedByAnotherError, FolderError):
    """A program other than ingestd appended: a fault of that table alone."""


class AllegedTakeoverError(AppendedByAnotherError, FolderError):
    """A raw table's log looks as if another ingestd had written there.

    It may be forged, so it is evidence about that table only: `_epochs`, which a real takeover
    fences first, decides about the source.
    """


class ConflictChecker:
    """Judges the commits in a log that its writer did not expect.

    `writer`: the process that commits there. `decides`: whether a takeover in this log is one of
    the source; if not, it raises AllegedTakeoverError.
    """

    def __init__(self, writer: WriterIdentity, *, decides: bool) -> None:
        self._writer = writer
        self._decides = decides

    def judge(
        self, log: TableLog, version: int, commit: Commit, token: str, before: pa.Schema | None
    ) -> CommitAuthor:
        """Return the author of a commit; refuse one of another writer.

        `before`: the schema that the commit follows. A commit that drops a column is refused too.
        """
        verdict, signed = commit.judge(token), commit.writer
        is_others = verdict in {CommitAuthor.FENCE, CommitAuthor.FOREIGN}
        is_own = signed == self._writer.name
        if is_others and not self._decides:
            # Where no commit of this process is in doubt, one in its name is forged.
            is_own = is_own and self._writer.is_in_doubt(log.folder, version - 1)
            if not is_own:
                raise self._intruder_error(log, version, commit)
        if is_others and is_own:
            raise TransientError(
                f"lake table {log.uri}: a commit that had failed appeared after all, as version"
                f" {version}",
                reason="storage",
                remedy="nothing to do: the lake is re-read",
            )
        if verdict is CommitAuthor.FENCE:
            self._writer.refuse_if_taken_over(signed, log.store.uri(""))
            raise TransientError(
                f"lake table {log.uri}: another ingestd has taken over (version {version})",
                reason="claimed",
                remedy="stop one of the two; this one stands by until the other has stopped",
            )
        if verdict is CommitAuthor.FOREIGN:
            raise self._intruder_error(log, version, commit)
        if verdict is CommitAuthor.WITHOUT_DATA:
            given = commit.schema_json
            if given is not None and before is not None:
                log.refuse_lost(before, arrow_schema(given, log.uri))
        return verdict

    def _intruder_error(self, log: TableLog, version: int, commit: Commit) -> OperatorError:
        taken_over = AppendedByAnotherError if self._decides else AllegedTakeoverError
        return (ForeignCommitError if commit.is_foreign_change else taken_over)(
            f"lake table {log.uri}: another writer appended version {version}",
            remedy="stop the other daemon or job that writes there, or give this source"
            " another name or lake; a raw table must have one writer only",
        )
