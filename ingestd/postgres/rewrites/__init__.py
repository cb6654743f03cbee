"""Row changes that come without events."""
