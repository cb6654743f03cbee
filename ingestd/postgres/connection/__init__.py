"""Connections: settings, TLS, liveness, the claim on a source, errors."""
