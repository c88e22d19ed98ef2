"""Inference: one path from an image to a prediction, and the engines that compute the logits."""
