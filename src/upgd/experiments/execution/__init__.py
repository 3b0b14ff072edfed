"""How an experiment is computed: jobs, who computes them, progress and estimates.

``running`` carries out a whole experiment: it divides it into ``jobs``, has ``workers`` (or a Ray ``cluster``)
compute them with ``work``, and stores every finished one. ``progress`` shows how far it is, ``estimate`` how long it
takes, and ``confirming`` repeats the best settings on fresh seeds. ``bench`` measures a machine.
"""
