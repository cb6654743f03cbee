"""The change feed of a table: every change with all of its values, append-only."""
