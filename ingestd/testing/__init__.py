"""What ingestd is tested with, for tests of other captures, lakes and readers.

Public are these modules, and in them the names that `docs/testing.md` lists:

- `running`: a pipeline between any capture and any lake;
- `fakes`: in-memory implementations of the ports;
- `embedded`: private Postgres servers and daemons;
- `oracle`: an independent fold of a raw table, and its comparison with the source.

Nothing here is needed by a daemon.
"""
