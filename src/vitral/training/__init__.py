"""Training: what a run is (recipe.py, recipes.py) and the loop that does it (loop.py)."""
