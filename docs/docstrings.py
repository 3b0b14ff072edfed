"""Docstrings speak to help() and to editors in the way of scientific Python; this turns them into what the site renders."""

import re
from typing import Any

import griffe


class ScientificPython(griffe.Extension):
    """Roles become code, a paragraph that ends in two colons gets one, and examples are examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = re.sub(r":(?:class|func|mod|meth|data|attr):(`+)~?", r"\1", obj.docstring.value)
            text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
