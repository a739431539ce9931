"""Renders a page into one file that needs nothing else: no network, no other file, no script but its own."""

import base64
import hashlib
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

TEMPLATES = "templates"


def render_page(template: str, script: str | None = None, **values: Any) -> str:
    """The HTML of a page.

    Every value is escaped. The page's content security policy allows inline styles and the one named script, by its
    hash; anything else that a value might smuggle in would neither run nor be fetched.

    Args:
        template: file name in this package's templates.
        script: file name of the page's script beside it, if it has one.
        values: what the template shows.
    """
    environment = Environment(
        loader=PackageLoader(__package__ or "", TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["compact_ranges"] = compact_ranges
    script_text = "" if script is None else _read(script)
    return environment.get_template(template).render(
        style=_read("style.css"), script=script_text, script_policy=_script_policy(script_text), **values
    )


def compact_ranges(numbers: list[int]) -> str:
    """Rising numbers with their runs shortened: [0, 1, 2, 5] is "0-2, 5", with an en dash."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)


def _read(name: str) -> str:
    return resources.files(__package__ or "").joinpath(TEMPLATES, name).read_text(encoding="utf-8")


def _script_policy(script: str) -> str:
    if not script:
        return "'none'"
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
