"""What the model looked at: one method a file, each from images to heatmaps of the images' shape."""
