"""Hundreds of online learners at once, each exactly what it would be alone."""
