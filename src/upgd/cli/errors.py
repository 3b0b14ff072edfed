"""Errors of the command line."""

__all__ = ["UsageError"]


class UsageError(ValueError):
    """Incompatible options: exit status 2."""
