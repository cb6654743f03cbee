"""Reads of the lake by the jobs."""
