"""The commands, one per module. Each module defines `COMMAND`; the table of commands is in `vitral.cli.main`."""
