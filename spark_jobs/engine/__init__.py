"""The engine that moves tables from epoch to epoch."""
