"""The data source."""
