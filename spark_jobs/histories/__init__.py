"""The history (SCD 2)."""
