"""Logical messages, written by any role with pg_logical_emit_message, with any content.

Source: PostgreSQL documentation, "Logical Replication Message Formats", Message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from ingestd.decode.pgoutput.messages import MESSAGE, Messages, Transactions
from ingestd.model.lsn import Lsn

OWN_PREFIX = b"ingestd\0"
"""The prefix of messages that only make the WAL grow."""
DDL_PREFIX = b"ingestd.ddl\0"
MOST_BYTES = 1 << 20
"""A larger message with the prefix was not written by ingestd's triggers."""

TellMessage = Callable[[bytes, Lsn, int], bool]
"""Called with the content of a message with the prefix `ingestd.ddl`, its transaction's commit
position, and the transaction's id. Returns whether the content is valid."""

_HEAD = struct.Struct(">cBQ")
_LENGTH = struct.Struct(">i")
_TRANSACTIONAL = 1


def tell_messages(messages: Messages, transactions: Transactions, tell: TellMessage) -> int:
    """Pass on the DDL messages, in order. Return the number of other messages.

    Any content is valid, because any role may write messages. Only messages passed on are copied.
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
