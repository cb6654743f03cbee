"""Row changes that the stream does not contain: rewrites by DDL, a key that was replaced.

`catalog_evidence` decides from two catalog readings whether a table must be re-read, `ddl_log` from
events of event triggers, `stream_evidence` from what only the stream has shown.
"""
