"""The server, the measured daemon and the table of figures that all benchmarks share."""
