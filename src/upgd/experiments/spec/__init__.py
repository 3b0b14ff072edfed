"""What an experiment is: its declaration in Python or TOML, names of settings and networks, default grids and lengths.

``declare`` has :class:`Experiment`, ``files`` reads one from TOML; ``defaults`` and ``grids`` say what is tried where
nobody says, ``architecture`` names networks and ``settings`` the settings of all methods.
"""
