"""Two sources or fingerprints, or several of one server, against each other, without pairing tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from draftscope.cli.common import HtmlOption, JsonOption, QuietOption, SkipBadOption, ThreadsOption, setup
from draftscope.errors import UsageError


def command(
    a: Annotated[str, typer.Argument(metavar="A", help="The reference: training states, or their fingerprint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What is held against it: a capture, other states, a fingerprint.")],
    more: Annotated[list[str] | None, typer.Argument(
        metavar="[C]...", help="Later ones of the same server: all are held against A, in order.", show_default=False)] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, metavar="N", help="Slots in a capture's rows; without it found, else 3.")
    ] = None,
    format: Annotated[list[str] | None, typer.Option(
        "--format", metavar="NAME", help="Read states as this format; given twice, first A's, then B's (auto = found).")] = None,
    skip_bad: SkipBadOption = False,
    json: JsonOption = None,
    html: HtmlOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Hold the statistics of B against those of A, in units of what A's own groups differ by.

    Which slot of B could be which entry of A, which tokens, positions and dimensions carry the difference, and the smallest one
    that would have been seen. Several fingerprints of one server show whether it drifts.
    """
    ui = setup(quiet, threads, json=json, html=html, schema="compare")
    from draftscope.compare.statistics import compare_fingerprints, known_fingerprint
    from draftscope.report.compared import comparison_page
    from draftscope.report.comparison import comparison_story
    from draftscope.scan.fingerprint import Fingerprint
    from draftscope.scan.scan import scan
    from draftscope.states.opening import AUTO, open_source
    from draftscope.states.places import place

    formats = format or [AUTO]
    if len(formats) > 2:
        raise UsageError("--format names at most two formats", remedy="First that of A, then that of B")

    def read(given: str, named: str) -> Fingerprint:
        path = place(given)
        known = known_fingerprint(path)
        if known is not None:
            return known
        source = open_source(path, named, skip_bad=skip_bad)
        with ui.progress(f"scanning {path.name}", total=len(source), unit="sequences") as advance:
            result = scan(source, slots=slots, on_item=lambda rows, size: advance(1), skip_odd=skip_bad)
        ui.note_source(source, path, skipped=1)
        return result

    later = [read(path, formats[-1]) for path in more or ()]
    comparison = compare_fingerprints(read(a, formats[0]), read(b, formats[-1]), later)
    for part in comparison_story(comparison):
        ui.print(part)
    ui.write_json(comparison)
    ui.write_html(lambda: comparison_page(comparison))
    return 0
