"""Spark jobs against what Spark alone does."""
