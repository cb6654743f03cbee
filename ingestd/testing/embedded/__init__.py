"""Private servers and daemons for tests and the demo.

Public:

- `postgres`: `PostgresServer`, a server in a folder, set up for logical replication;
- `daemon`: `Daemon`, `ingestd run` as a child process, and `DaemonEndedError`;
- `installations`: `find_bindirs`, the PostgreSQL servers of this machine;
- `waiting`: `await_until`, a wait for a condition with a limit.

The other modules are their parts. Whatever is started ends with this process, however that ends.
"""
