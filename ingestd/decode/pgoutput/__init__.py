"""Decoding of the logical replication protocol."""
