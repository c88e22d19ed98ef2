"""The Vision Transformer explorer: a static site in which a ViT runs in the browser.

`site/` holds the page (`ui/`) and the model in JavaScript (`engine/`) as ES modules. This package writes them, with a
model's weights, into a folder that also opens from file://, where browsers refuse modules and fetch(). Modules become
one classic script and weights travel in scripts.
"""
