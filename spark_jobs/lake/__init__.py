"""The lake as the jobs read it."""
