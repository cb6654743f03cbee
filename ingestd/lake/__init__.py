"""The lake of a source on Delta: raw tables, epochs, the registry (design sections 2 and 8.7)."""
