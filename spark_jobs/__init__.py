"""PySpark jobs that read the lake (design section 8.8)."""
