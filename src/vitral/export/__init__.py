"""A model for other programs, in one file, with the proof that it says the same."""
