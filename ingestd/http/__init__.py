"""The HTTP server, its page, and its clients."""
