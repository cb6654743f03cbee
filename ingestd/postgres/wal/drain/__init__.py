"""Draining a backlog through SQL functions."""
