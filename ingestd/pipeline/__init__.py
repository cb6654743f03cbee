"""Drives the ports: one pipeline per source, under a supervisor. Knows no Postgres and no Delta."""
