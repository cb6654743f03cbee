"""Rows of COPY."""
