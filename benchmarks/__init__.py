"""Benchmarks of speed as ratios, interleaved in one run. ``python -m benchmarks [NAME …]`` runs all or the named ones."""
