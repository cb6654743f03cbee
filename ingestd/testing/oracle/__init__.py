"""An independent fold and comparison, which share no code with the lake's."""
