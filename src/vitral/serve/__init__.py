"""Models over HTTP: the app, the batches, the limits, and the page."""
