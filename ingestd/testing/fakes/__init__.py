"""In-memory implementations of the ports; the same contract suites test the real ones."""
