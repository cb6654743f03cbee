"""How COPY data comes off a connection."""
