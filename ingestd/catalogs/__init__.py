"""Catalogs in which the lake's tables have names: Unity Catalog, AWS Glue."""
