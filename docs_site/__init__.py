"""How the documentation is made: reference pages from the code, and a site from docs/."""
