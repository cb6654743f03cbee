"""The composition root: builds everything from a config, and runs it.

A command's module is imported by that command alone: the daemon starts sooner.
"""
