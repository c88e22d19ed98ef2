"""HTTP server for trained models: routes, request batching, limits and the web page."""
