"""Start-up checks for a damaged or foreign lake, and their messages."""

from __future__ import annotations

from ingestd.lake.delta.conflicts import ForeignCommitError
from ingestd.lake.delta.log import TableLog
from ingestd.model.errors import FolderError, OperatorError
from ingestd.model.lake_state import Notice


def never_refuse(_version: int) -> None:
    """Accept the loss of the newest commit of `_epochs`, or of a reference table.

    If its epoch was acknowledged, the slot is ahead of the lake: that loss is reported.
    """


def torn_commit_error(log: TableLog, version: int) -> FolderError:
    """Return the error for an incomplete commit that can't be dropped."""
    return FolderError(
        f"lake table {log.uri}: commit {version} is incomplete, although later work was"
        " acknowledged: the disk lost data that it had reported as durable",
        remedy=f"put _delta_log/{version:020}.json back from a copy; or remove the folder of this"
        " table: ingestd checks again automatically, and reports where it resumes",
    )


def refuse_foreign(log: TableLog) -> None:
    """Raise FolderError if another program did something that ingestd can't follow.

    It changed rows (ForeignCommitError) or dropped columns since ingestd's last commit, or the
    table uses a feature that ingestd does not write (NotWritableError).
    """
    commits = list(log.others_commits())
    version = next((n for n, commit in commits if commit.is_foreign_change), None)
    if version is not None:
        raise ForeignCommitError(
            f"lake table {log.uri}: another writer made version {version}, which changes rows",
            remedy="stop the program that writes there",
        )
    log.ensure_columns_kept(commits)
    log.ensure_writable()


def notices_of(log: TableLog) -> list[Notice]:
    """Return notices of what an operator should know after a log was opened. Blocks."""
    set_aside, log.set_aside = log.set_aside, []
    found = [
        Notice(
            "lake.file_set_aside",
            f"lake table {log.uri}: _delta_log/{name} was incomplete, as after a power failure",
            "nothing to do: the file was renamed, and its content is written again",
        )
        for name in set_aside
    ]
    version = log.foreign_version()
    if version is not None:
        found.append(
            Notice(
                "lake.foreign_commit",
                f"lake table {log.uri}: another writer made version {version}",
                "stop the program that writes there",
            )
        )
    return found


def missing_error(uri: str, root: str) -> OperatorError:
    """Return the error for a missing `_epochs` or `_tables` of a lake that has other tables."""
    return OperatorError(
        f"lake {uri}: the table is missing, but {root} has others",
        remedy=f"put it back from a copy; or remove {root} and start once with --accept-empty-lake"
        " and the source's name: all its tables are then re-read",
    )
