"""The decoder under bytes that nobody meant; see docs/fuzzing.md."""
