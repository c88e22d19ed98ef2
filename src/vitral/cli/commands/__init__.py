"""The commands, one a file; vitral.cli.main has their table."""
