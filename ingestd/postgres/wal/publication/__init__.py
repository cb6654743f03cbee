"""The publication: the tables and columns that the server sends.

The modules and their responsibilities::

    preparation.py  decides what to do, before the slot is used; what the server refuses
    statements.py   the SQL, without a connection
    alteration.py   adds and drops tables, together or one by one
    replacement.py  drops and re-creates it, if a table must not stay in it
    unmanaged.py    if another role owns it: its faults, and the statement for the owner
"""
