"""Ideas built on the plain ViT, one a file. The core knows nothing of them."""
