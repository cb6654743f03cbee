"""Fakes of every port, servers and daemons for tests, an independent oracle."""
