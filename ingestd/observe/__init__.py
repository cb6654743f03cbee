"""The daemon's observable state: metrics, status, logs, notifications to systemd."""
