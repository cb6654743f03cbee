"""Snapshots: splits, pages and consistent views."""
