"""The Spark data source that reads tables from Postgres."""
