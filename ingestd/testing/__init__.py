"""Fakes of every port, embedded servers and daemons for tests, and an independent oracle."""
