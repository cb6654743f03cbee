"""Private servers and daemons for tests and the demo."""
