"""Implementations of the model contract. No backend imports another."""
