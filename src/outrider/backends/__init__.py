"""Implementations of the model contract. Each module stands alone."""
