"""A trained ViT, arranged for asking only: packed matrices, number types, what was measured on this machine."""
