"""Kernels generated from a method's rule, for optimizers and populations.

``source.py`` prints a rule as assignments, ``modules.py`` turns source text into a module, and ``folder.py`` defines where it
is stored. For numba, ``machine.py`` is the interface to numba and LLVM, ``functions.py`` contains the functions that rules
may call, ``normals.py`` the noise, ``team.py`` the threads, and ``cpu_step.py`` the step of an optimizer. For GPUs,
``triton_source.py`` and the modules that it uses print the kernels of the same step, ``cuda_layout.py`` contains their memory
and launches, and ``cuda_step.py`` their order. Import the modules by their full names, because only some of them need numba.
"""
