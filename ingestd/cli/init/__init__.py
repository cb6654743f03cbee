"""`ingestd init`: inspects a database and writes a first config for it."""
