"""Write the description for PyPI: README.md with links that work there.

Relative links become links into the repository of ``[project.urls]``. Without a repository, links become plain text and
images are left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def for_pypi(text: str, repository: str | None) -> str:
    """The text of a README for a page outside the repository."""

    def image(found: re.Match[str]) -> str:
        return f"![{found[1]}]({repository}/raw/main/{found[2]})" if repository else ""

    def link(found: re.Match[str]) -> str:
        return f"[{found[1]}]({repository}/blob/main/{found[2]})" if repository else found[1]

    text = re.sub(r"!\[([^]]*)\]\((?!https?:)([^)]+)\)", image, text)
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:)([^)]+)\)", link, text)


class Readme(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_pypi(text, repository)}
