"""Changes found by ordinary queries, without replication or logical WAL (design section 8.6)."""
