"""Two sources or fingerprints against each other, without pairing tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftscope.cli.common import JsonOption, QuietOption, ThreadsOption, setup


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference: training states, or their fingerprint.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What is held against it: a capture, other states, a fingerprint.")],
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, metavar="N", help="Slots in a capture's rows; without it found, else 3.")
    ] = None,
    json: JsonOption = None,
    quiet: QuietOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Hold the statistics of B against those of A: norms, profiles, and which slot of B could be which entry of A."""
    ui = setup(quiet, threads, json=json)
    from draftscope.compare.statistics import compare_fingerprints
    from draftscope.report.comparison import comparison_story
    from draftscope.scan.fingerprint import Fingerprint, is_fingerprint, load_fingerprint
    from draftscope.scan.scan import scan
    from draftscope.states.opening import open_source

    def read(path: Path) -> Fingerprint:
        if is_fingerprint(path):
            return load_fingerprint(path)
        source = open_source(path)
        with ui.progress(f"scanning {path.name}", total=len(source), unit="sequences") as advance:
            result = scan(source, slots=slots, on_item=lambda rows, size: advance(1))
        if source.skipped:
            ui.note(f"{path}: {len(source.skipped)} skipped; the first, {source.skipped[0].path}: {source.skipped[0].why}")
        return result

    comparison = compare_fingerprints(read(a), read(b))
    for part in comparison_story(comparison):
        ui.print(part)
    ui.write_json(comparison)
    return 0
