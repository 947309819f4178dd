"""Training data rewritten between plain, speculators and SpecForge, so that the way back gives the same bytes.

Plain data and speculators keep the last state before the final norm, SpecForge after it. With the target at hand the one is
made from the other: norm(x) forward; backward x / weight, whose norm is x again (the row's length, which the norm divides out,
is lost). The state as it was is kept beside it under a name that the trainer does not read, and taken from there on the way back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draftscope.errors import DraftscopeError, UsageError
from draftscope.states import plain, specforge, speculators
from draftscope.states.leftover import sweep_up, temporary
from draftscope.states.opening import open_source
from draftscope.states.places import Place
from draftscope.states.plain import write_sample
from draftscope.states.speculators_write import DataSetWriter
from draftscope.states.types import Norm, Sample, Skipped
from draftscope.target.norms import effective_weight, taken_after_norm
from draftscope.target.parts import TargetParts, read_parts

FORMATS = (plain.NAME, speculators.NAME, specforge.NAME)
EXPECTED: dict[str, Norm] = {speculators.NAME: "pre", specforge.NAME: "post"}
"""Side of the final norm on which a trainer takes the last state to be; plain data say it themselves."""
GROUP = 2000


@dataclass(slots=True)
class Converted:
    """What was written.

    Attributes:
        steps: what was done to the data on the way, each once.
        skipped: what was passed over, and why.
    """

    files: int
    tokens: int
    steps: list[str]
    skipped: list[Skipped]


def convert_data(path: Place, out: Path, to: str, *, format: str | None = None, target: Path | None = None,
                 on_tokens: Callable[[int], None] | None = None) -> Converted:
    """Rewrite training data; `out` appears whole or not at all.

    Args:
        path: training data of any format that is read.
        out: a folder that does not exist yet, or is empty.
        to: `plain`, `speculators` or `specforge`.
        format: read the data as this format whatever they look like.
        target: a folder with the target's parts, needed where the last state must cross the final norm.
        on_tokens: called after each sample with its tokens.

    Raises:
        UsageError: no such format to write, a capture, or an output that holds something.
        DraftscopeError: nothing readable, or a last state on the other side of the final norm and no target.
    """
    if to not in FORMATS:
        raise UsageError(f"cannot write `{to}`", remedy=f"Known: {', '.join(FORMATS)}")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UsageError("holds something already", where=str(out), remedy="Name a new folder")
    source = open_source(path, format, kind="samples")
    if source.kind != "samples":
        raise UsageError(f"holds a capture ({source.chosen}), not training data", where=str(path))
    parts = None if target is None else read_parts(target)
    work = temporary(out)
    sweep_up(out.absolute().parent, out.name)
    shutil.rmtree(work, ignore_errors=True)
    result = Converted(0, 0, [f"read as {source.format}: {source.chosen}"], [])
    try:
        work.mkdir(parents=True)
        write, close = _writer(to, work)
        crossing = _Crossing(to, parts)
        for sample in _numbered(source, result.steps):
            write(crossing.carry(sample))
            result.files += 1
            result.tokens += len(sample.token_ids)
            if on_tokens is not None:
                on_tokens(len(sample.token_ids))
        close()
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir():
            out.rmdir()
        work.rename(out)
    except OSError as error:
        raise DraftscopeError(f"cannot be written ({error.strerror or error})", where=str(out)) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result.steps += [*getattr(source, "notes", []), *crossing.steps]
    result.skipped = list(source.skipped)
    return result


def _numbered(source: object, steps: list[str]) -> Iterator[Sample]:
    """Samples with a number each; numbered anew where two share one or one has none."""
    seen: set[int] = set()
    following = 0
    for sample in source:  # type: ignore[attr-defined]
        assert isinstance(sample, Sample)
        if sample.index < 0 or sample.index in seen:
            if not any("numbered anew" in step for step in steps):
                steps.append(f"samples without a number of their own are numbered anew, {sample.name} first")
            while following in seen:
                following += 1
            sample = replace(sample, index=following)
        seen.add(sample.index)
        yield sample


def _writer(to: str, folder: Path) -> tuple[Callable[[Sample], None], Callable[[], None]]:
    if to == plain.NAME:
        return lambda sample: _write_plain(folder, sample), lambda: None
    if to == speculators.NAME:
        rows = DataSetWriter(folder)
        return rows.add, rows.close

    def write(sample: Sample) -> None:
        start = sample.index // GROUP * GROUP
        group = folder / f"rows_{start}-{start + GROUP}"
        group.mkdir(exist_ok=True)
        torch.save(specforge.record_of(sample), group / f"data_{sample.index}.ckpt")

    return write, lambda: None


def _write_plain(folder: Path, sample: Sample) -> None:
    write_sample(folder / f"hs_{sample.index}.safetensors", sample, said_norm=True)


class _Crossing:
    """Takes the last state to the side of the final norm that the format is read on."""

    def __init__(self, to: str, parts: TargetParts | None) -> None:
        self.to, self.wanted, self.parts = to, EXPECTED.get(to), parts
        self.steps: list[str] = []

    def carry(self, sample: Sample) -> Sample:
        side = self._side(sample)
        if self.wanted is None or side == self.wanted:
            kept = self.wanted is None and sample.other_last is not None and side == "post"
            return self._swap(sample, side) if kept else replace(sample, claimed_norm=side)
        if sample.other_last is not None:
            return self._swap(sample, side)
        if side is None:
            self._say(f"which side of the final norm the last state is on is not known; {self.to} takes it for "
                      f"{'before' if self.wanted == 'pre' else 'after'} it")
            return sample
        if self.parts is None:
            what = "before" if side == "pre" else "after"
            raise DraftscopeError(f"its last state is {what} the final norm, and {self.to} takes the one on the other side",
                                  where=sample.name, remedy="Give the target (--target DIR; its parts are enough)")
        states = sample.states.clone()
        last = states[:, -1].clone()
        if self.wanted == "post":
            states[:, -1] = self.parts.final_norm(last).to(states.dtype)
            self._say("the final norm was applied to the last state; the state before it is kept beside it")
        else:
            weight = effective_weight(self.parts)
            states[:, -1] = torch.where(weight == 0, 0.0, last.float() / weight).to(states.dtype)
            self._say("the last state was divided by the final norm's weight, so that the norm gives it again; the length of the "
                      "rows before the norm is not known; the state as it was is kept beside it")
        return replace(sample, states=states, claimed_norm=self.wanted, other_last=last)

    def _swap(self, sample: Sample, side: Norm | None) -> Sample:
        states = sample.states.clone()
        assert sample.other_last is not None
        states[:, -1] = sample.other_last
        self._say("the last state on the other side of the final norm was kept in the files and is taken from there")
        return replace(sample, states=states, claimed_norm="pre" if side == "post" else "post", other_last=None)

    def _side(self, sample: Sample) -> Norm | None:
        """By the data where the target is at hand, else as the files say."""
        found = None
        if self.parts is not None:
            if sample.states.shape[2] != self.parts.width:
                raise DraftscopeError(f"states are {sample.states.shape[2]} wide, the target {self.parts.width}",
                                      where=sample.name, remedy="States and target do not belong together")
            found = taken_after_norm(self.parts, sample.states[:, -1])
        if found is None:
            return sample.claimed_norm
        side: Norm = "post" if found else "pre"
        if sample.claimed_norm is not None and side != sample.claimed_norm:
            self._say(f"the files say that the last state is {sample.claimed_norm}-norm; by the target it is {side}-norm")
        return side

    def _say(self, text: str) -> None:
        if text not in self.steps:
            self.steps.append(text)
