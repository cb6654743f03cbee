"""Keys of polled tables, for sweeps."""
