"""What is wrong with a command line."""

__all__ = ["UsageError"]


class UsageError(ValueError):
    """Options that do not go together: exit code 2."""
