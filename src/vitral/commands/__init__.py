"""The commands, one a file; vitral.cli has their table."""
