"""Decoding of rows sent by COPY."""
