"""`ingestd init`: asks a database what it is, and writes a first config for it."""
