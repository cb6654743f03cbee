"""The public Python API that reads a lake: see `ingestd.open_lake`. Docs: docs/reading.md.

`docs/internals/reading.md` has the design. Public: `Lake`, `LakeSource`, `LakeTable` in `lake.py`.
"""
