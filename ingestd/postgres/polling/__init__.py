"""Changes by ordinary queries: no replication right, no logical WAL (design section 8.6)."""
