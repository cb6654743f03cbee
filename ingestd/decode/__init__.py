"""From the bytes of Postgres protocols to Arrow batches. Sans-IO: bytes in, batches out."""
