"""The composition root: builds everything from a config, and runs it.

Each command imports only its own module, so that the daemon starts faster.
"""
