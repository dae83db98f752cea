"""What this machine does with a model: its cost curves from the cache, and the load options that suit it."""
