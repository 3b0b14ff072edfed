"""The paper's experiments: which there are, how they are reproduced, and the pages that show the results.

``catalogue`` lists the studies, ``reproduce`` carries one out and ``pages`` writes it down with ``notes``;
``best_known`` has settings from public sources. ``utility_quality`` is the study that compares approximations of
utility.
"""
