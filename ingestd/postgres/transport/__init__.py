"""Reading COPY data from a connection."""
