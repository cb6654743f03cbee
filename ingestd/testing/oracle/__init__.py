"""An independent fold and comparison; shares no code with the lake's."""
