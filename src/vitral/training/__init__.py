"""Training: setup, the Trainer and its step, optimizers, checkpoints and callbacks."""
