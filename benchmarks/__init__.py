"""Benchmarks: each figure beside a reference taken in the same run. `python -m benchmarks`."""
