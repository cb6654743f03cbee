"""Servers and daemons of their own, for tests and the demo."""
