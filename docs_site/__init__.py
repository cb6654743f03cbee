"""The documentation's build: reference pages from the code, and a site from docs/."""
