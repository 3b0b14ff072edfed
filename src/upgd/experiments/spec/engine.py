"""The version of what the engine computes; part of a result's key."""

__all__ = ["ENGINE"]

#: Increase it when results change on purpose; results of older versions are kept.
ENGINE = 2
