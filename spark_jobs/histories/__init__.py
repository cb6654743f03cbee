"""The history of a table (SCD type 2): every version of every row."""
