"""The paper's experiments: which there are, how they are reproduced, and the pages that show the results.

``catalogue`` lists the studies, ``plans`` has the learners of each stage of one, ``reproduce`` carries it out, ``pieces``
divides a long one, and ``remaining`` counts what is missing. ``pages`` writes the results down with ``statistics``, ``notes``
and ``drawing``. ``best_known`` has settings from public sources. ``utility_quality`` is the study that compares
approximations of utility.
"""
