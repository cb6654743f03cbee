"""What the daemon costs, and how fast it is."""
