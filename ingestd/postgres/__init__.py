"""Change capture from Postgres."""
