"""`upgd methods` and `upgd problems`."""

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from upgd.cli.options import Json, load_torch, option_name

if TYPE_CHECKING:
    from upgd.methods import Setting

__all__ = ["methods", "problems"]


def methods(name: str | None = None, /, *, as_json: Json = False) -> None:
    """List the methods, or show the rule, settings and defaults of one.

    Examples:

        upgd methods

        upgd methods upgd

    Parameters
    ----------
    name
        Name of the method. Default: list all.
    as_json
        Print JSON.
    """
    load_torch()
    from upgd.experiments.spec import describe
    from upgd.methods import METHODS

    if as_json:
        _print_facts(describe.method, METHODS, name)
    elif name is None:
        _print_list((one, describe.first_paragraph(cls)) for one, cls in METHODS.items())
        print("\n`upgd methods NAME` shows the settings of a method.")
    else:
        print(_method_text(name))


def problems(name: str | None = None, /, *, as_json: Json = False) -> None:
    """List the problems, or show the options and defaults of one.

    Examples:

        upgd problems

        upgd problems output-permuted-digits

    Parameters
    ----------
    name
        Name of the problem. Default: list all.
    as_json
        Print JSON.
    """
    load_torch()
    from upgd.experiments.spec import describe
    from upgd.streams import names

    if as_json:
        _print_facts(describe.problem, names(), name)
    elif name is None:
        _print_list((one, describe.about_problem(one)) for one in names())
        print("\n`upgd problems NAME` shows the options of a problem.")
    else:
        print(_problem_text(name))


def _print_facts(of: Callable[[str], dict[str, Any]], names: Iterable[str], name: str | None) -> None:
    """Print the facts about all names, or about one, as JSON."""
    print(json.dumps([of(one) for one in names] if name is None else of(name), indent=2))


def _print_list(described: Iterable[tuple[str, str]]) -> None:
    """Print names with their descriptions; names with the same description share an entry."""
    from upgd.experiments.spec.describe import plain

    alike: dict[str, list[str]] = {}
    for name, about in described:
        alike.setdefault(about, []).append(name)
    for about, names in alike.items():
        print(f"{_wrapped(', '.join(names))}\n{_wrapped(plain(about), 4)}")


def _method_text(name: str) -> str:
    from upgd.experiments.spec import describe
    from upgd.experiments.spec.settings import ordered
    from upgd.methods.registry import get

    method = get(name)
    about, _, details = (describe.plain(part) for part in (inspect.getdoc(method) or "").partition("\n\n"))
    lines = [f"{name} ({method.label})", "", _wrapped(about)]
    if details:
        lines += ["", "\n\n".join(map(_paragraph, details.removeprefix("::\n\n").split("\n\n")))]
    lines += ["", "Settings:"]
    for one in ordered(method.settings):
        setting = method.settings[one]
        lines += [f"  {option_name(one)}  {_values(setting)}", _wrapped(setting.help, 6)]
    required = {one: setting for one, setting in method.settings.items() if setting.default is ...}
    given = " ".join(f"{option_name(one)} {_word(_typical(setting))}" for one, setting in required.items())
    return "\n".join([*lines, "", "Example:", f"  upgd run output-permuted-digits --method {name} {given}"])


def _paragraph(text: str) -> str:
    """Wrap a paragraph of a docstring, but not the indented formulas."""
    return text if text.startswith(" ") else _wrapped(text.replace("::", ":"))


def _typical(setting: "Setting") -> Any:
    return setting.grid[len(setting.grid) // 2] if setting.grid else setting.example


def _values(setting: "Setting") -> str:
    """Return the default of a setting, what it accepts, and what a sweep tries."""
    words = ["required" if setting.default is ... else f"default {_word(setting.default)}"]
    if setting.choices:
        words.append(" or ".join(map(_word, setting.choices)))
    if setting.least is not None:
        words.append(f"≥ {setting.least:g}")
    if setting.below is not None:
        words.append(f"< {setting.below:g}")
    if setting.grid:
        words.append(f"short grid {', '.join(map(_word, setting.grid))}")
    return "; ".join(words)


def _problem_text(name: str) -> str:
    from upgd.experiments.spec import describe

    facts = describe.problem(name)
    lines = [name, "", _wrapped(describe.plain(facts["about"])), ""]
    if facts["options"]:
        lines.append("Options, with defaults:")
        lines += [f"  {_option_text(one, **about)}" for one, about in facts["options"].items()]
    if "network" not in facts:
        return "\n".join([*lines, "", "Example:", "  upgd run utility-quality-weights"])
    return "\n".join(
        [
            *lines,
            "",
            "Defaults of an experiment:",
            f"  --network {facts['network']} --steps {facts['steps']} --seeds {facts['seeds']}",
            "",
            "Example:",
            f"  upgd run {name} --method upgd --lr 0.01",
        ]
    )


def _option_text(name: str, default: Any = None, required: bool = False) -> str:
    if default is not None:
        return f"--option {name}={_word(default)}"
    return f"--option {name}=…  ({'required' if required else 'the default depends on the data set'})"


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_word, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _wrapped(text: str, indent: int = 0) -> str:
    """Wrap text to the width of the terminal; text that is not printed to a terminal stays on one line."""
    from upgd.experiments.analysis.layout import terminal_width

    words, width = " " * indent, terminal_width()
    if width is None:
        return words + " ".join(text.split())
    return textwrap.fill(
        " ".join(text.split()),
        max(width, indent + 20),
        initial_indent=words,
        subsequent_indent=words,
        break_on_hyphens=False,
    )
