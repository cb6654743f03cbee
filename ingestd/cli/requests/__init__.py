"""What the commands have done: by the running daemon, or on the server."""
