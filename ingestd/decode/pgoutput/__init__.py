"""The replication protocol's messages."""
