"""Compaction and cleanup of Delta tables."""
