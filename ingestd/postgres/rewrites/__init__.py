"""Detection of row changes that the stream does not contain, such as rewrites by DDL."""
