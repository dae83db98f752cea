"""A draft made cheaper without training: fewer tokens, and types of weights that are fast here."""
