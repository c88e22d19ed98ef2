"""Training without labels: its trainer, its backend, and the images and recipe of a run."""
