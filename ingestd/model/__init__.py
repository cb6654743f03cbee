"""The words: schemas, changes, positions, errors. Imports nothing else of ingestd."""
