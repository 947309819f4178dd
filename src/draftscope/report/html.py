"""A diagnosis as one self-contained page: no script, no request, nothing that a hostile string could switch on."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from draftscope import text
from draftscope.findings import Diagnosis
from draftscope.report import clouds, curves, figures, parts, strip, words

LONG = 40
"""Rows from which a table is not unfolded on paper."""


def page(diagnosis: Diagnosis, *, title: str = "draftscope: diagnosis", heatmaps: Sequence[figures.Heatmap] | None = None) -> str:
    """The page's text.

    Args:
        heatmaps: slot-by-boundary errors; without them those that the placement holds.
    """
    maps = figures.heatmaps(diagnosis) if heatmaps is None else heatmaps
    style = _style()
    return _environment().get_template("diagnosis.html").render(
        diagnosis=diagnosis, title=title, words=words, text=text, style=Markup(style), style_hash=_hash(style),
        verdict=words.verdict(diagnosis), ladder=figures.ladder(diagnosis), positions=figures.positions(diagnosis),
        rungs=words.rungs(diagnosis), k=words.most_drafted(diagnosis.acceptance), lags=curves.lags(diagnosis),
        heatmaps=[figures.heatmap(each) for each in maps], norms=curves.norms(diagnosis), long=LONG,
        channels=clouds.channels(diagnosis), components=clouds.components(diagnosis), learning=parts.learning(diagnosis),
        by_context=parts.breakdown(diagnosis, "context"), by_kind=parts.breakdown(diagnosis, "kind"),
        strips=strip.strips(diagnosis), statuses=strip.statuses, version=metadata.version("draftscope"),
    )


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("draftscope.report"), autoescape=True, undefined=StrictUndefined, finalize=_harmless,
        trim_blocks=True, lstrip_blocks=True,
    )
    return environment


def _harmless(value: Any) -> Any:
    """Escaping leaves control and bidirectional characters in; `visible` does not."""
    return value if isinstance(value, Markup) else text.visible(value)


@cache
def _style() -> str:
    return "\n" + resources.files("draftscope.report").joinpath("templates/page.css").read_text("utf-8")


def _hash(style: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
