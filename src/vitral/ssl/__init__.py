"""Self-supervised pretraining: views of unlabelled images, masks, methods, and measures of collapse."""
