"""The mirror of a table: its current rows, moved from epoch to epoch."""
