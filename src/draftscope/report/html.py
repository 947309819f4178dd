"""Results as one self-contained page: no script, no request, nothing that a hostile string could switch on."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime
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
    return render(
        "diagnosis.html", diagnosis=diagnosis, title=title, words=words,
        verdict=words.verdict(diagnosis), ladder=figures.ladder(diagnosis), positions=figures.positions(diagnosis),
        rungs=words.rungs(diagnosis), k=words.most_drafted(diagnosis.acceptance), lags=curves.lags(diagnosis),
        heatmaps=[figures.heatmap(each) for each in maps], norms=curves.norms(diagnosis),
        channels=clouds.channels(diagnosis), components=clouds.components(diagnosis), learning=parts.learning(diagnosis),
        by_context=parts.breakdown(diagnosis, "context"), by_kind=parts.breakdown(diagnosis, "kind"),
        strips=strip.strips(diagnosis), statuses=strip.statuses,
    )


def render(template: str, **values: Any) -> str:
    """A template of this package, with the style sheet and the words that all pages share; every string in it is escaped."""
    shared = {"text": text, "style": Markup(_style()), "policy": Markup(policy()), "when": _when, "long": LONG,
              "version": metadata.version("draftscope")}
    return _environment().get_template(template).render(shared, **values)


def policy(*, form: str = "'none'", frame: str = "", ancestors: str = "") -> str:
    """What a page may do: show its own style sheet, by its hash, and nothing else."""
    parts = ["default-src 'none'", f"style-src '{_hash(_style())}'", "base-uri 'none'", f"form-action {form}"]
    parts += [f"frame-src {frame}"] if frame else []
    parts += [f"frame-ancestors {ancestors}"] if ancestors else []
    return "; ".join(parts)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


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
