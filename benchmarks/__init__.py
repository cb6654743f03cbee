"""Benchmarks: each figure against a reference from the same run. `python -m benchmarks`."""
