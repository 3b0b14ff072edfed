"""Speed as ratios, measured side by side in one run. ``python -m benchmarks [NAME …]`` runs all, or those named."""
