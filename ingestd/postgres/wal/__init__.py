"""Capture from the write-ahead log: logical replication with pgoutput.

The modules and their responsibilities::

    capture.py             the ChangeCapture, composed of the modules below
    server.py              the server's version, settings and privileges
    publication/           the tables that the server sends
    slots/                 replication slots, and the points at which they export snapshots
    replication_stream.py  START_REPLICATION: blocks of messages, read by
                           ../transport/copy_reader.py
    change_stream.py       the backlog, then the stream
    stream_faults.py       what an error that ends the stream means for the next start
    slot_confirmation.py   which connection reports a confirmed position
    relation_cache.py      which table a message of the stream is about
    drain/                 when a backlog is drained (decision.py), and how, by SQL functions;
                           slots/advance.py moves the slot meanwhile
    preflight.py           `ingestd check`
    connector.py           the factory that the registry knows
"""
