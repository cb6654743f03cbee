"""Delta's log and files."""
