"""Reconciling a mirror with the source."""
