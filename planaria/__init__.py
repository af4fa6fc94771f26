"""Planaria: training that goes on when machines die, with the very weights of a run in which nothing failed."""

__version__ = "0.1.0"
