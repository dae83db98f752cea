"""Distil a draft model from the model it is to draft for."""
