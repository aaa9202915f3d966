"""The `rope-ext` command: parses words, calls recipes, prints. Heavy imports wait until a command runs."""

from rope_ext.cli import look, measure, show, stretch  # each puts its commands into the app
from rope_ext.cli.start import app, main

__all__ = ["app", "look", "main", "measure", "show", "stretch"]
