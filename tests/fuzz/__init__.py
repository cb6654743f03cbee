"""The decoder under arbitrary bytes; see docs/fuzzing.md."""
