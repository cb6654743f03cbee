"""Drives the ports: a pipeline per source under a supervisor. Knows no Postgres and no Delta."""
