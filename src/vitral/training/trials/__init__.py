"""Measurements before a run, on a trainer that writes nothing: batch size, learning rate, speed."""
