"""In-memory implementations of the ports, held to the same contract suites as the real ones."""
