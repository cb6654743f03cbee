"""Sinks: where changes go."""
