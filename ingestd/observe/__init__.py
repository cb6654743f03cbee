"""What a daemon shows of itself: metrics, status, HTTP."""
