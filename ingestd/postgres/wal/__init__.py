"""Capture from the write-ahead log: logical replication with pgoutput.

Who owns what::

    server.py       what the server is and may do
    publication.py  which tables the server sends
    slot.py         what it keeps, and the points at which snapshots are exported
    stream.py       START_REPLICATION: blocks of messages, read by ../copy_reader.py
    relations.py    which table a message of the stream is about
    catch_up.py     a backlog, by SQL functions: cut by backlog_parts.py, given by drain_slot.py
                    through ../copy_out.py; slot_advance.py moves the slot itself meanwhile
    snapshot.py     tables read at one point, by several readers
    capture.py      the ChangeCapture that holds them together
    preflight.py    `ingestd check`
    connector.py    the factory that the registry knows
"""
