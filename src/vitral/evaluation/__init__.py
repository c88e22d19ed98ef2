"""How good a model is: numbers, with their uncertainty."""
