"""What a lake may be found to be at a start, and what is said of it."""

from __future__ import annotations

from ingestd.lake.delta.appender import ForeignCommitError
from ingestd.lake.delta.log import TableLog
from ingestd.model.errors import FolderError, OperatorError
from ingestd.model.lake_state import Notice


def never_refuse(_version: int) -> None:
    """Let the newest commit of `_epochs`, or of a reference table, go.

    If an epoch was confirmed, the slot is ahead of the lake then, which is a loss that is told.
    """


def cut_short(log: TableLog, version: int) -> FolderError:
    """Say that a commit is not whole which can't be done without."""
    return FolderError(
        f"lake table {log.uri}: commit {version} is not whole, and what came after it was"
        " acknowledged: the disk lost what it had said to be durable",
        remedy=f"put _delta_log/{version:020}.json back from a copy; or remove the folder of this"
        " table: ingestd looks again by itself, and says what goes on from there",
    )


def refuse_foreign(log: TableLog) -> None:
    """Raise FolderError for what another program did that ingestd can't follow.

    It changed rows (ForeignCommitError) or took columns away since ingestd's last commit; or the
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
    """Say what was found of a log at its opening that a person should know. Blocks."""
    set_aside, log.set_aside = log.set_aside, []
    found = [
        Notice(
            "lake.file_set_aside",
            f"lake table {log.uri}: _delta_log/{name} was not whole, as a power cut leaves a file",
            "nothing to do: it is there under another name, and what it held is written again",
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


def missing(uri: str, root: str) -> OperatorError:
    """Say that one of the source's own tables is gone, and others are there."""
    return OperatorError(
        f"lake {uri}: the table is gone, and there are others in {root}",
        remedy=f"put it back from a copy; or remove {root} and start once with --accept-empty-lake"
        " and the source's name: all its tables are read again then",
    )
