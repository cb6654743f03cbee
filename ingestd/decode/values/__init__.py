"""Conversion of text values to Arrow columns."""
