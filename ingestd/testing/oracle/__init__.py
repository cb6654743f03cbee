"""An independent fold and comparison, which share no code with the lake's.

Public:

- `comparison`: `await_caught_up`, `compare_source`, `compare_table`, `LakeComparison`: the source's
  rows against the folded raw tables, by the server's own texts;
- `folding`: `fold`, `FoldedTable`: the current rows of a raw table, and contradictions in it;
- `schema_history`: `SchemaHistory`: the lake columns of each source column, from `_tables`.

`server_text` is a part of them.
"""
