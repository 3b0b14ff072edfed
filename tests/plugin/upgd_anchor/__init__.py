"""One method, one stream, one network and one diagnostic; importing this registers all of them."""

from upgd_anchor import diagnostic, method, network, stream

__all__ = ["diagnostic", "method", "network", "stream"]
