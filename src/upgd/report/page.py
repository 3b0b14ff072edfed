"""The report page: one self-contained HTML file that needs no network access.

Everything shown in a chart is also in a table. All text from a file of results is escaped. As a second line of defence, the
page's Content-Security-Policy allows only its own three scripts and no network requests.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from upgd import writing
from upgd.experiments.analysis.metrics import Metric
from upgd.experiments.analysis.stores import read
from upgd.report.content import Section, sections
from upgd.report.parts import overview, section
from upgd.store import Record

__all__ = ["content", "plotly", "render", "write"]

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<noscript><style>.chart, .switches, .heat {{ display: none; }}</style></noscript>
</head>
<body>
<a class="skip" href="#content">Skip to the results</a>
{sweep}<div id="page"{news}>{content}</div>
<noscript><p class="note">The charts need JavaScript; the tables contain all numbers.</p></noscript>
{scripts}
</body>
</html>
"""

#: Progress of a sweep, shown above the part of the page that is replaced on every update.
_SWEEP = """\
<div id="sweep" hidden><progress max="1" aria-label="Progress of the sweep"></progress><span></span></div>
"""


def write(
    store: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    problem: str | None = None,
    title: str | None = None,
    metric: Metric | None = None,
) -> Path:
    """Write a report about one or several files of results.

    Args:
        store: The file of results, or a list of files to compare.
        path: The output file, such as ``report.html``.
        problem: Restrict the report to this problem.
        title: The title of the page. Default: the names of the files.
        metric: The metric of tables and curves. Default: accuracy for classification, loss for regression.

    Returns:
        The path.
    """
    stores = [Path(store)] if isinstance(store, str | os.PathLike) else [Path(one) for one in store]
    records, damage = read(*stores, problem=problem)
    if not records:
        of_problem = f" of {problem!r}" if problem else ""
        names = " and ".join(map(str, stores))
        raise ValueError(
            f"{names} {'has' if len(stores) == 1 else 'have'} no results{of_problem}; run `upgd run` or `upgd sweep` first"
        )
    target = Path(path)
    writing.check(target)
    if title is None and len(stores) > 1:
        title = " and ".join(one.name for one in stores)
    page = render(records, stores[0], damage=damage, title=title, metric=metric)
    with writing.text(target) as file:
        file.write(page)
    return target


def render(
    records: Sequence[Record],
    store: Path,
    *,
    damage: Sequence[str] = (),
    title: str | None = None,
    metric: Metric | None = None,
) -> str:
    """Return the whole page."""
    return page_around(content(records, store, damage, title, metric), store, title=title)


def page_around(content: str, store: Path, *, news: str | None = None, title: str | None = None) -> str:
    """Return the whole page with the given content. With ``news``, the page is live: it loads plotly and later updates from
    its server."""
    live = news is not None
    programs = [_resource("page.js"), _resource("live.js")] if live else [plotly(), _resource("page.js")]
    trusted = " ".join(f"'sha256-{_hash(program)}'" for program in programs)
    own = " 'self'; connect-src 'self'" if live else ""
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {trusted}{own}"
    )
    tags = ['<script src="plotly.js"></script>'] if live else []
    return _PAGE.format(
        policy=policy,
        title=escape(title or f"{store.name}: results"),
        style=_resource("page.css"),
        sweep=_SWEEP if live else "",
        news="" if news is None else f' data-news="{escape(news)}"',
        content=content,
        scripts="\n".join([*tags, *(f"<script>{program}</script>" for program in programs)]),
    )


def content(
    records: Sequence[Record],
    store: Path,
    damage: Sequence[str] = (),
    title: str | None = None,
    metric: Metric | None = None,
) -> str:
    """Return the part of the page that changes during a sweep: text, tables, chart data and any damage of the store."""
    found = sections(records, metric)
    anchors = [f"comparison-{number}" for number in range(1, len(found) + 1)]
    parts = [section(one, anchor, str(store)) for one, anchor in zip(found, anchors, strict=True)]
    charts = {anchor: one.chart() for one, anchor in zip(found, anchors, strict=True)}
    return (
        f"<header>{overview(records, found, title or store.name)}{_damage(damage)}</header>"
        f"{_contents(found, anchors)}"
        f'<main id="content" tabindex="-1">{"".join(parts) or _NOTHING}</main>'
        f"<footer>{_footer(records)}</footer>"
        f'<script type="application/json" id="data">{_json(charts)}</script>'
    )


@cache
def plotly() -> str:
    """Return plotly.js in its basic bundle: a quarter of the full size, so browsers load it faster."""
    # A closing tag inside a string would end the script element.
    return _resource("plotly/plotly-basic.min.js").replace("</script", "<\\/script")


_NOTHING = "<p>There are no results yet. They will appear here as learners finish.</p>"


def _damage(damage: Sequence[str]) -> str:
    if not damage:
        return ""
    return (
        f'<p class="note" role="alert"><strong>The store is damaged; the damaged part is not shown:</strong> '
        f"{escape('; '.join(damage))}. <code>upgd store repair</code> copies what is intact into a new file.</p>"
    )


def _contents(found: Sequence[Section], anchors: Sequence[str]) -> str:
    if len(found) < 2:
        return ""
    links = "".join(
        f'<li><a href="#{anchor}">{escape(one.comparison.title)}</a></li>'
        for one, anchor in zip(found, anchors, strict=True)
    )
    return f'<nav aria-label="Contents"><h2>Contents</h2><ol>{links}</ol></nav>'


def _footer(records: Sequence[Record]) -> str:
    versions = ", ".join(sorted({f"upgd {record.package} with torch {record.torch}" for record in records}))
    moment = datetime.now().astimezone()
    now = f"{moment.day} {moment:%B %Y, %H:%M %Z}"  # Windows does not support %-d
    return f"<p>{escape(f'Created on {now}. Results of {versions}.' if versions else f'Created on {now}.')}</p>"


def _json(value: object) -> str:
    """Serialize to JSON that is safe inside an HTML element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")


def _hash(program: str) -> str:
    return base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()


@cache
def _resource(name: str) -> str:
    return (files("upgd.report") / name).read_text(encoding="utf-8")
