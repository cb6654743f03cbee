"""The text output of commands."""
