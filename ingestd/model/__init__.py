"""The domain types: schemas, changes, positions, errors. Imports nothing else of ingestd."""
