"""64-bit hashes of values and rows."""
