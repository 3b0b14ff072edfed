"""The functions of Box and Muller's transform as polynomials, which every kernel uses; the highest power comes first.

Each is the best of its degree in the sense of the largest error (below 10⁻⁷, about the last bit of a float32).
"""

__all__ = ["COSINE", "LOGARITHM", "SINE"]

#: −2 ln(1 + m) / m for 1 + m in [√½, √2).
LOGARITHM = (0.20238398, -0.32819915, 0.3464682, -0.39748859, 0.49920987, -0.66672228, 1.00001265, -1.99999965)
#: cos πy as a polynomial of y², for |y| ≤ ½.
COSINE = (0.2196968, -1.33188016, 4.05841192, -4.93479286, 0.99999995)
#: sin πy / y, likewise.
SINE = (0.07724063, -0.59805749, 2.55003391, -5.16770708, 3.14159259)
