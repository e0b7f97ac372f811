"""The command line. One module per subcommand: parse, call, print."""

from tswift.cli.app import main

__all__ = ["main"]
