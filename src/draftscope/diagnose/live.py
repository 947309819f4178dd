"""A running server tried as a black box: prompts that the draft was trained on against fresh ones, by its counters alone.

On its own training prompts, answered greedily, the draft meets the text that it learned. If it accepts there what replay gives on
the training states, wiring, loading and runtime are sound, and what is lost on other prompts is data or training. If it does not,
no text explains it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from draftscope.diagnose.case import Inputs
from draftscope.eagle3.acceptance import Counts, length_interval, summarise
from draftscope.engines.counters import Counters, count
from draftscope.engines.fetching import Document, fetch
from draftscope.engines.server import Answer, Server, answer, connect
from draftscope.errors import DraftscopeError, UsageError
from draftscope.findings import Rung
from draftscope.pipeline.prompts import read_prompts
from draftscope.states.opening import format_kind, open_source
from draftscope.states.places import model_folder
from draftscope.states.types import Sample, Source
from draftscope.target.model import load_tokenizer

READ = 8
"""Training samples looked at for each prompt wanted."""
PARTS = 8
"""Parts of a group, counted one by one: the interval comes from their spread."""
SETTLE, SETTLED = 0.25, 40
"""Seconds between scrapes until the counters rest, and how many scrapes are waited for."""
LEAST_PROMPT, LONGEST_PROMPT = 2, 4096
SAME_TEXT = 0.5
"""Share of the training answers' tokens that the server has to write for its text to count as theirs."""


@dataclass(slots=True)
class Group:
    """Prompts of one origin and what the server made of them.

    Attributes:
        name: `training prompts` or `fresh prompts`.
        prompts: token ids. known: the answers in the training data, () where there are none.
        parts: counters of each part.
        same_text: tokens of the answers that are the training data's, and of how many; up to the first that differs.
    """

    name: str
    prompts: list[list[int]]
    known: list[list[int]] = field(default_factory=list)
    parts: list[Counters] = field(default_factory=list)
    same_text: tuple[int, int] = (0, 0)

    def rung(self) -> Rung | None:
        """Pooled acceptance with its interval; None where the server counted no step."""
        counted = [part for part in self.parts if part.drafts]
        if not counted:
            stated = [part.stated for part in self.parts if part.stated is not None]
            if not stated:
                return None
            k = max((part.k or 0) for part in self.parts) or 1
            return Rung(k=k, length=float(np.mean(stated)), joint=[], conditional=[], rounds=0, rows=0, readout="engine")
        k = max((part.k or 0) for part in counted)
        if not k or not all(len(part.accepted) == k for part in counted):
            steps, total = sum(part.drafts for part in counted), sum(part.total for part in counted)
            # One position stands for all: its "acceptance" is the number of accepted drafts a step.
            sums = [Counts(f"part {i}", np.array([p.drafts]), np.array([p.total]), p.drafts) for i, p in enumerate(counted)]
            return Rung(k=k or 1, length=1 + total / steps, interval=length_interval(sums, 1), joint=[], conditional=[],
                        rounds=steps, rows=0, readout="engine")
        counts = [Counts(f"part {i}", np.array([part.drafts, *part.accepted[:-1]]), np.array(part.accepted), part.drafts)
                  for i, part in enumerate(counted)]
        return summarise(counts, k, "engine")


@dataclass(slots=True)
class Live:
    """What a server did with both groups (None = no such prompts), and what is to be said of the measurement."""

    server: Server
    training: Group | None = None
    fresh: Group | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return [group for group in (self.training, self.fresh) if group is not None]

    @property
    def k(self) -> int | None:
        return max((part.k or 0 for group in self.groups for part in group.parts), default=0) or None

    def together(self, *, every: bool) -> Group:
        """The training prompts, else the fresh ones; with `every` both."""
        groups = self.groups if every else self.groups[:1]
        return Group(" and ".join(group.name for group in groups), [p for group in groups for p in group.prompts],
                     parts=[part for group in groups for part in group.parts])

    def rung(self, *, every: bool) -> Rung:
        found = self.together(every=every).rung()
        assert found is not None
        return found

    def counters(self, *, every: bool) -> Counters:
        """All parts together."""
        group = self.together(every=every)
        counted = [part for part in group.parts if part.drafts] or group.parts
        k = len(counted[0].accepted)
        same = all(len(part.accepted) == k for part in counted)
        return replace(
            counted[0], drafts=sum(part.drafts for part in counted), total=sum(part.total for part in counted),
            accepted=tuple(sum(part.accepted[i] for part in counted) for i in range(k)) if same else (), figures=(),
            says=f"the server's counters over {len(group.prompts)} {group.name}",
        )

    def told(self) -> dict[str, Any]:
        """For the JSON: by group its prompts, its acceptance, and how far the text is the training data's."""
        told: dict[str, Any] = {"url": self.server.url, "engine": self.server.engine, "version": self.server.version}
        for group in self.groups:
            rung = group.rung()
            told[group.name] = {
                "prompts": len(group.prompts), "acceptance": None if rung is None else rung.model_dump(),
                "same_text": list(group.same_text) if group.known else None,
            }
        return told


def sample_prompts(source: Source, requests: int, longest: int) -> Group:
    """Prompts of training samples whose masks tell where the first answer begins, evenly spread over the first READ of them."""
    found: list[tuple[list[int], list[int]]] = []
    for sample in islice(source, READ * requests):
        if not isinstance(sample, Sample) or sample.loss_mask is None or not bool(sample.loss_mask.any()):
            continue
        first = int(sample.loss_mask.nonzero()[0])
        if LEAST_PROMPT <= first < longest:
            run = sample.loss_mask[first:].long().cumprod(0)
            found.append((sample.token_ids[:first].tolist(), sample.token_ids[first : first + int(run.sum())].tolist()))
    number = min(len(found), requests)
    chosen = [found[i * len(found) // number] for i in range(number)]
    return Group("training prompts", [prompt for prompt, _ in chosen], [known for _, known in chosen])


def hear(inputs: Inputs, report: Callable[[str], None] = lambda _: None) -> Live:
    """Have the server of a case answer training prompts and fresh ones.

    Raises:
        UsageError: no prompt to ask.
        DraftscopeError: the server, or what the prompts are read from, does not do.
    """
    assert inputs.url is not None
    live = Live(connect(inputs.url))
    longest = (live.server.longest or LONGEST_PROMPT) - inputs.max_new
    named = [format for format in inputs.formats if format_kind(format) == "samples"]
    for path, name in ((inputs.train, "training"), (inputs.train_heldout, "fresh")):
        if path is not None:
            source = open_source(path, named[0] if named else None, kind="samples", skip_bad=inputs.skip_bad)
            group = sample_prompts(source, inputs.requests, longest)
            if group.prompts and name == "training":
                live.training = group
            elif group.prompts:
                live.fresh = replace(group, name="fresh prompts")
            else:
                live.notes.append(f"{path} tells no prompts: its samples have no loss mask, or begin with an answer")
    if inputs.prompts is not None:
        words = _Words(None if inputs.target is None else model_folder(inputs.target))
        found = [p.token_ids for p in read_prompts(inputs.prompts, words, limit=inputs.requests)]
        live.fresh = Group("fresh prompts", [ids for ids in found if len(ids) < longest])
    if not any(group.prompts for group in live.groups):
        raise UsageError("there is no prompt to ask the server", where=inputs.url,
                         remedy="Give training states with loss masks (--train), or prompts (--prompts)")
    # Behind a URL nobody can tell when the files are there.
    serve = inputs.serve if isinstance(inputs.serve, Path) else None
    before = _files(serve)
    listen(live, max_new=inputs.max_new, report=report)
    if serve is not None and not _arrived(serve, before, time.sleep):
        live.notes.append(f"no request that was asked arrived in {inputs.serve}: does this server capture into another folder?")
    return live


@dataclass(frozen=True, slots=True)
class _Words:
    """The target's tokenizer alone."""

    folder: Path | None

    @property
    def tokenizer(self) -> Any:
        if self.folder is None:
            raise UsageError("prompts of text are rendered by the target's tokenizer", remedy="Give --target, or token_ids")
        return load_tokenizer(self.folder)


def _files(folder: Path | None) -> dict[str, int]:
    if folder is None or not folder.is_dir():
        return {}
    return {entry.name: entry.stat().st_size for entry in folder.iterdir() if entry.suffix == ".safetensors"}


def _arrived(folder: Path, before: dict[str, int], rest: Callable[[float], None]) -> bool:
    """Wait until the capture's files rest; whether there are more of them than before."""
    last = None
    for _ in range(SETTLED):
        now = _files(folder)
        if now == last and now != before:
            return True
        last = now
        rest(4 * SETTLE)
    return _files(folder) != before


def listen(live: Live, *, max_new: int = 64, at_once: int = 8, report: Callable[[str], None] = lambda _: None,
           rest: Callable[[float], None] = time.sleep) -> None:
    """Have the server answer each group in parts, and count each part.

    Args:
        rest: waits, for tests.

    Raises:
        DraftscopeError: the server refuses, or tells nothing of speculative decoding.
    """
    if _scrape(live.server) is not None and _resting(live.server, rest) is None:
        live.notes.append("the server's counters moved while nothing was asked: other requests are counted too")
    for group in live.groups:
        matched = compared = 0
        parts = [range(i, len(group.prompts), PARTS) for i in range(min(PARTS, len(group.prompts)))]
        for number, part in enumerate(parts):
            report(f"asking {live.server.url} for {group.name}, part {number + 1} of {len(parts)}")
            answers, counters = _part(live.server, [group.prompts[i] for i in part], max_new, at_once, rest)
            group.parts.append(counters)
            for i, got in zip(part, answers, strict=True):
                if group.known and got.token_ids is not None:
                    same, of = _agree(got.token_ids, group.known[i])
                    matched, compared = matched + same, compared + of
        group.same_text = (matched, compared)
        if group.rung() is None:
            raise DraftscopeError("counted no verify step", where=live.server.url,
                                  remedy="Is speculative decoding on? SGLang: --speculative-algorithm EAGLE3; "
                                         "vLLM: --speculative-config")


def _part(server: Server, prompts: Sequence[Sequence[int]], max_new: int, at_once: int, rest: Callable[[float], None]) -> tuple[
        list[Answer], Counters]:
    """Answers and what was counted meanwhile: by each answer where they tell it, else by the metrics page."""
    before = _scrape(server)
    answers = answer(server, prompts, max_new, at_once=at_once)
    told = Document(f"answers of {server.url}", json.dumps([got.told for got in answers]))
    try:
        return answers, count([told])
    except DraftscopeError:
        pass
    if before is None:
        raise DraftscopeError("has no page /metrics, and its answers count nothing", where=server.url,
                              remedy="SGLang: --enable-metrics; vLLM: without --disable-log-stats")
    after = _resting(server, rest) or _scrape(server)
    assert after is not None
    return answers, count([replace(before, where=f"{before.where} (before)"), after])


def _scrape(server: Server) -> Document | None:
    try:
        return fetch(server.url)[0]
    except DraftscopeError:
        return None


def _resting(server: Server, rest: Callable[[float], None]) -> Document | None:
    """The page once what it says of speculative decoding stays the same; None where it does not, or there is none."""
    last = _scrape(server)
    if last is None:
        return None
    for _ in range(SETTLED):
        rest(SETTLE)
        now = _scrape(server)
        if now is None:
            return None
        if _speculative(now) == _speculative(last):
            return now
        last = now
    return None


def _speculative(page: Document) -> list[str]:
    return [line for line in page.text.splitlines() if "spec" in line and not line.startswith("#") and "_created" not in line]


def _agree(said: Sequence[int], known: Sequence[int]) -> tuple[int, int]:
    """Tokens of an answer up to the first that is not the training data's, and how many there were to compare."""
    of = min(len(said), len(known))
    same = next((i for i in range(of) if said[i] != known[i]), of)
    return same, of


def separated(live: Live, trained: Rung | None) -> tuple[str, str]:
    """What the black box tells: `elsewhere` (no text explains the loss), `text`, `sound` or `unknown`; and the sentence.

    Args:
        trained: the draft replayed on the training states.
    """
    training = None if live.training is None else live.training.rung()
    fresh = None if live.fresh is None else live.fresh.rung()
    same, of = (0, 0) if live.training is None else live.training.same_text
    if training is None or training.length is None:
        return "unknown", "no training prompts were asked (--train, with loss masks): data and wiring cannot be told apart"
    assert live.training is not None
    said = f"on {len(live.training.prompts)} of its own training prompts the draft accepts {_of(training)}"
    beside = "" if fresh is None or live.fresh is None else f", on {len(live.fresh.prompts)} fresh ones {_of(fresh)}"
    if trained is not None and trained.length is not None and trained.k == training.k and _less(training, trained):
        departs = ""
        if of and same < SAME_TEXT * of:
            departs = f"; but the server's answers leave the training data's after {same} of {of} tokens: the text differs too"
        return "elsewhere", (f"{said} where replay on the training states gives {_of(trained)}: no other text explains that, so "
                             f"look at capture, wiring, loading and runtime{departs}")
    if fresh is not None and fresh.length is not None and _less(fresh, training):
        return "text", f"{said}{beside}: it serves what it learned; the loss is in what it was trained on"
    if trained is None or trained.length is None:
        return "unknown", f"{said}{beside}; what it should accept takes training states and the draft (--train, --draft)"
    return "sound", (f"{said}{beside}; replay on the training states gives {_of(trained)}: wiring, loading and runtime cost "
                     "nothing that shows")


def _of(rung: Rung) -> str:
    interval = "" if rung.interval is None else f" [{rung.interval[0]:.2f}, {rung.interval[1]:.2f}]"
    return f"{rung.length:.2f}{interval}"


def _less(lower: Rung, upper: Rung) -> bool:
    """Clearly and noticeably less: intervals apart where there are any, and by a tenth of what is gained."""
    assert lower.length is not None and upper.length is not None
    top = lower.interval[1] if lower.interval else lower.length
    bottom = upper.interval[0] if upper.interval else upper.length
    return top < bottom and upper.length - lower.length > 0.1 * (upper.length - 1)
