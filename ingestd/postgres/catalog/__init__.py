"""Queries of the system catalogs."""
