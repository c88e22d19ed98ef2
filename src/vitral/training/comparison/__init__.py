"""Comparisons that train and evaluate several models on the same images."""
