"""`python -m ingestd`."""

from ingestd.cli import main

main()
