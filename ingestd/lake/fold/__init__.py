"""Current rows from changes."""
