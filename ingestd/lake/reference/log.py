"""The Delta log of a reference table: one commit replaces all its rows, or some of its files.

Source: Delta protocol, "Add File and Remove File", "Change Metadata". Measured with deltalake 1.6:
a write transaction in mode ``overwrite`` removes every file and sets the given schema at once.
It does not add the feature that a timestamp without time zone needs, and the table then becomes
unreadable. So the feature is added before, in a commit without data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, Schema, TableFeatures
from deltalake.transaction import RemoveAction

from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_INTERVAL
from ingestd.lake.delta.commit import CONTENT, add_action
from ingestd.lake.delta.log_paths import OWN_FILE
from ingestd.lake.store.errors import storage_faults
from ingestd.model.errors import TransientError
from ingestd.model.schema import TIMESTAMP_NTZ
from ingestd.ports import Fragment

RETENTION = "interval 1 days"
"""How long removed files are kept for readers of earlier versions."""
LOOK_BACK = 50
"""Maximum number of commits, without a change of data, that are searched for the last digest."""


class ReferenceLog(AppendLog):
    """See AppendLog; its commits may carry a digest of the rows."""

    removes_rows = True
    retention = RETENTION
    _content: str | None = None

    def replace(
        self,
        schema: pa.Schema,
        fragments: Sequence[Fragment],
        *,
        content: str | None,
        app_version: int | None,
    ) -> int:
        """Replace all files by these; create the table if it does not exist."""
        self._content = content
        if not self.exists:
            configuration = {
                "delta.enableDeletionVectors": "false",
                "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
                "delta.deletedFileRetentionDuration": self.retention,
            }
            return self.create(Creation(schema, configuration), fragments, app_version)
        if _has_local_time(schema):
            self._allow_local_time()
            self._content = content
        wanted = Schema.from_arrow(schema)

        def attempt(token: str) -> None:
            self.handle.create_write_transaction(
                [add_action(f) for f in fragments],
                "overwrite",
                wanted,
                commit_properties=self._properties(token, app_version),
            )

        return self._commit(attempt)

    def exchange(
        self, fragments: Sequence[Fragment], removed: Sequence[str], app_version: int
    ) -> int:
        """Replace some files by others. Raise TransientError if those are missing."""
        self._content = None
        base = self.version
        now_ms = time.time_ns() // 1_000_000
        gone = [RemoveAction(path, data_change=True, deletion_timestamp=now_ms) for path in removed]

        def attempt(token: str) -> None:
            if self.version != base:
                raise TransientError(
                    f"lake table {self.uri}: its files were replaced meanwhile", reason="storage"
                )
            self.handle.create_write_transaction(
                [*(add_action(f) for f in fragments), *gone],
                "append",
                self.handle.schema(),
                commit_properties=self._properties(token, app_version),
            )

        return self._commit(attempt)

    def content(self) -> str | None:
        """Return the digest of this version's rows, None if it is unknown."""
        return self.content_at(self.version)

    def content_at(self, version: int) -> str | None:
        """Return the digest of a version's rows, None if it is unknown."""
        for number in range(version, max(-1, version - LOOK_BACK), -1):
            if not self.has_commit(number):
                return None
            commit = self._commit_at(number)
            found = commit.stamps.get(CONTENT)
            if found is not None:
                return found
            if any(f.is_change for f in commit.files):
                return None
        return None

    def vacuum(self) -> None:
        """Remove the files that no version younger than the retention uses."""
        with storage_faults(self.uri):
            # deltalake itself would follow links in the table's folder.
            for name in self.handle.vacuum(dry_run=True):
                if OWN_FILE.match(name):
                    self.store.remove(f"{self.folder}/{name}")

    def _allow_local_time(self) -> None:
        protocol = self.handle.protocol()
        if "timestampNtz" in (protocol.writer_features or []):
            return
        self._content = self.content()

        def attempt(token: str) -> None:
            self.handle.alter.add_feature(
                TableFeatures.TimestampWithoutTimezone,
                allow_protocol_versions_increase=True,
                commit_properties=self._properties(token, None),
            )

        self._commit(attempt)

    def _properties(self, *args: Any, **kwargs: Any) -> CommitProperties:  # noqa: ANN401
        properties = super()._properties(*args, **kwargs)
        if self._content is not None and properties.custom_metadata is not None:
            properties.custom_metadata[CONTENT] = self._content
        return properties


_DATA = {"add", "remove"}


def _has_local_time(schema: pa.Schema) -> bool:
    def within(kind: pa.DataType) -> bool:
        if pa.types.is_nested(kind):
            return any(within(kind.field(i).type) for i in range(kind.num_fields))
        return bool(kind == TIMESTAMP_NTZ)

    return any(within(f.type) for f in schema)
