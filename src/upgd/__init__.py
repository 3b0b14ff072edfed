"""Learning from streams that never stop changing."""
