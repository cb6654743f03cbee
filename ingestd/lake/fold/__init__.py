"""Current rows from changes: `vectorized` folds to outcomes, `plain` is the definition."""
