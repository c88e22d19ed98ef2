"""Export a model to one file for other programs, checked against the model before it is kept."""
