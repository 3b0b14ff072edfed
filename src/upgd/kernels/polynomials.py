"""Functions as polynomials, shared by all kernels; the highest power comes first.

Each polynomial of the Box–Muller transform minimizes the maximum error for its degree (below 10⁻⁷, about the last bit of a
float32).
"""

__all__ = ["COSINE", "LOGARITHM", "SINE", "TANH"]

#: −2 ln(1 + m) / m for 1 + m in [√½, √2).
LOGARITHM = (0.20238398, -0.32819915, 0.3464682, -0.39748859, 0.49920987, -0.66672228, 1.00001265, -1.99999965)
#: cos πy as a polynomial of y², for |y| ≤ ½.
COSINE = (0.2196968, -1.33188016, 4.05841192, -4.93479286, 0.99999995)
#: sin πy / y as a polynomial of y², for |y| ≤ ½.
SINE = (0.07724063, -0.59805749, 2.55003391, -5.16770708, 3.14159259)
#: (tanh x − x) / x³ as a polynomial of x², for |x| < ½, by least squares.
TANH = (-0.006947, 0.02147272, -0.05393379, 0.13333227, -0.33333333)
