"""A method: decay towards the initial weights."""

import upgd.methods
from upgd.methods import Method, Setting


@upgd.methods.register
class Anchor(Method):
    """Gradient descent that decays towards the initial weights: ``w ← w − lr·(g + λ·(w − w₀))``."""

    name, label, colour = "anchor", "Anchor", "#117733"
    strength = Setting(0.01, symbol="λ", least=0, grid=(0.1, 0.01, 0.001), help="Strength of the pull.")
    state = {"start": "parameter"}

    def update(self, w, g, s, h):
        return w - h.lr * (g + h.strength * (w - s.start))
