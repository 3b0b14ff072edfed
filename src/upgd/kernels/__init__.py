"""Code made from a method's rule, for optimizers and populations alike.

``source.py`` prints a rule as assignments, ``modules.py`` turns text into a module, ``folder.py`` says where it is kept.
For numba: ``machine.py`` has what numba needs to be told, ``functions.py`` what rules may call, ``normals.py`` the noise, and
``cpu_step.py`` the step of an optimizer. For a GPU ``cuda_step.py`` prints the same step for Triton.
Modules are imported by their full names, because only some of them need numba.
"""
