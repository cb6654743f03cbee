"""Snapshots: splits, pages, consistent views."""
