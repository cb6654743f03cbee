"""The reconciliation of mirrors with their source."""
