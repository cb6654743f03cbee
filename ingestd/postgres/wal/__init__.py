"""Capture from the write-ahead log: logical replication with pgoutput.

Who owns what::

    capture.py             the ChangeCapture that holds the rest together
    server.py              what the server is and may do
    publication.py         which tables the server sends; its statements: publication_sql.py
    slots/                 what the server keeps, and the points at which snapshots are exported
    replication_stream.py  START_REPLICATION: blocks of messages, read by
                           ../transport/copy_reader.py
    change_stream.py       the backlog, then the stream
    slot_confirmation.py   which connection reports a confirmed position
    relation_cache.py      which table a message of the stream is about
    drain/                 when a backlog is drained (decision.py), and how, by SQL functions;
                           slots/advance.py moves the slot meanwhile
    preflight.py           `ingestd check`
    connector.py           the factory that the registry knows
"""
