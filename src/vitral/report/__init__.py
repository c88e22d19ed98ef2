"""A run as pictures."""
