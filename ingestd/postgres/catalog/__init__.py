"""What the system catalogs say."""
