"""The ports: Protocols that `pipeline/` drives and a capture or a sink implements.

Their docstrings are the contract. `tests/contract/` checks every implementation against it: the
in-memory fakes of `ingestd.testing.fakes` as well as the real ones.

A kind of capture is found by its `ConnectorFactory`, a kind of lake by its `LakeFactory`.

The order of calls in a source's life, and the component that advances each position::

    capture.claim -> sink.open -> sink.refuse_beyond (capture.server_end) -> capture.continuity
      -> sink.write_lake_id -> sink.fence -> capture.discover -> capture.continuity -> sink.adopt
      -> capture.prepare -> capture.snapshot -> capture.changes ... capture.confirm -> close

    received    the capture, at a commit, or between transactions: ChangeSet.position
    durable     the sink, when EpochWriter.commit or Sink.advance returns
    confirmed   the pipeline alone, by ChangeCapture.confirm, and only to a durable position (I1)

Any async method may be cancelled at any await. The next `claim` and `open` must be able to repair
whatever it leaves unfinished.
"""

from ingestd.ports.capture import (
    CaptureLag,
    ChangeCapture,
    Continuity,
    Discovery,
    Fresh,
    LakeLost,
    Lost,
    Prepared,
    Refused,
    Resumed,
    ServerEnd,
    Snapshot,
    SnapshotItem,
    SnapshotPage,
    SplitRead,
    TableRead,
)
from ingestd.ports.change_log import ChangeLog
from ingestd.ports.connector import (
    ColumnInfo,
    Connector,
    ConnectorFactory,
    Coverage,
    Metadata,
    PageSource,
    Split,
    SplitManager,
    TableInfo,
)
from ingestd.ports.demand import ServerCapacity, ServerDemand
from ingestd.ports.lake import LakeFactory, StorageWait
from ingestd.ports.pause import PauseMark
from ingestd.ports.reference import ReferenceSink, ReferenceState, ReferenceTableSource
from ingestd.ports.sink import (
    EpochWriter,
    Fragment,
    LakeMaintenance,
    MaintainedTable,
    PageSink,
    Sink,
    StoppedTables,
)

__all__ = [
    "CaptureLag",
    "ChangeCapture",
    "ChangeLog",
    "ColumnInfo",
    "Connector",
    "ConnectorFactory",
    "Continuity",
    "Coverage",
    "Discovery",
    "EpochWriter",
    "Fragment",
    "Fresh",
    "LakeFactory",
    "LakeLost",
    "LakeMaintenance",
    "Lost",
    "MaintainedTable",
    "Metadata",
    "PageSink",
    "PageSource",
    "PauseMark",
    "Prepared",
    "ReferenceSink",
    "ReferenceState",
    "ReferenceTableSource",
    "Refused",
    "Resumed",
    "ServerCapacity",
    "ServerDemand",
    "ServerEnd",
    "Sink",
    "Snapshot",
    "SnapshotItem",
    "SnapshotPage",
    "Split",
    "SplitManager",
    "SplitRead",
    "StoppedTables",
    "StorageWait",
    "TableInfo",
    "TableRead",
]
