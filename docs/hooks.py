"""Docstrings speak to help() and editors in the way of scientific Python; this turns it into what the site shows."""

import re


def on_page_content(html: str, **_: object) -> str:
    html = re.sub(r":(?:class|func|mod|meth|data|attr):<code>~?([^<]+)</code>", r"<code>\1</code>", html)
    return html.replace("::</p>", ":</p>")
