"""The declaration of an experiment, in Python or TOML; names of settings and networks; default grids and lengths.

``declare`` defines :class:`Experiment`, and ``files`` reads one from TOML. ``defaults`` and ``grids`` define default values,
``architecture`` names networks, and ``settings`` collects the settings of all methods.
"""
