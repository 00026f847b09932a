"""Pellucid: Group Relative Policy Optimization, clear enough to see through."""

__version__ = "0.1.0"
