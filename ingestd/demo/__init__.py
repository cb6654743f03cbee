"""The demo: an embedded Postgres, a shop, the real daemon, and a comparison at the end."""
