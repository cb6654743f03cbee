"""The commands that act on the running daemon, the lake or the server."""
