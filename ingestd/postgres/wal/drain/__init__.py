"""Draining a backlog through SQL."""
