"""Captures: where changes come from."""
