"""The fold: current rows from changes."""
