"""Epochs to micro-batches."""
