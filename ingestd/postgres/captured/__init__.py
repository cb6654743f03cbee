"""The captured tables: catalog, configuration and lake combined."""
