"""Execution of experiments: jobs, workers, progress and estimates.

``running`` runs a whole experiment: it splits it into ``jobs``, computes them with ``workers`` (or on a Ray ``cluster``)
using ``work``, and stores every finished job. ``progress`` displays progress, ``estimate`` predicts run times, and
``confirming`` reruns the best settings on fresh seeds. ``bench`` measures the speed of a machine.
"""
