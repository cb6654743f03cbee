"""Logical messages: what pg_logical_emit_message wrote, anyone's, with any content.

Source: PostgreSQL documentation, "Logical Replication Message Formats", Message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from ingestd.decode.pgoutput.messages import MESSAGE, Messages, Transactions
from ingestd.model.lsn import Lsn

OWN_PREFIX = b"ingestd\0"
"""Of messages that only make the WAL grow."""
DDL_PREFIX = b"ingestd.ddl\0"
MOST_BYTES = 1 << 20
"""A larger one with that prefix was written by others."""

TellMessage = Callable[[bytes, Lsn, int], bool]
"""Takes the content of a message with the prefix `ingestd.ddl`, where its transaction commits, and
the transaction's id. Says whether it is what it should be."""

_HEAD = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">i")
_TRANSACTIONAL = 1


def tell_messages(messages: Messages, transactions: Transactions, tell: TellMessage) -> int:
    """Tell of those that are about DDL, in their order. Return how many others there are.

    Whatever one has in it is no error: every role may write them. None is copied that is not told.
    """
    ignored = 0
    for i in np.flatnonzero(messages.types == MESSAGE).tolist():
        start, end = int(messages.starts[i]), int(messages.ends[i])
        at = start + _HEAD.size
        head = messages.source.buffer[start : at + len(DDL_PREFIX)]
        if head[_HEAD.size :].startswith(OWN_PREFIX):
            continue
        content = at + len(DDL_PREFIX) + _LENGTH.size
        is_ours = head.endswith(DDL_PREFIX) and content <= end <= content + MOST_BYTES
        if not (is_ours and head[1] & _TRANSACTIONAL):
            ignored += 1
            continue
        lsn, xid = transactions.commit_of(i)
        ignored += not tell(messages.source.buffer[content:end], lsn, xid)
    return ignored
