"""The work of `draftscope train`, once its options are known: data, vocabulary, shape, the run, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftscope import stopping
from draftscope.boundaries import default_boundaries
from draftscope.cli.common import Ui, keep
from draftscope.cli.extract import conversations_of
from draftscope.eagle3.corpus import Corpus, FileCorpus, split, token_counts
from draftscope.eagle3.dialects import rope_of
from draftscope.eagle3.examples import Fitting
from draftscope.eagle3.parallel import Ranks
from draftscope.eagle3.start import draft_vocabulary, shape_of
from draftscope.eagle3.train import Event, Result, Settings, Watch, train
from draftscope.eagle3.vocabmap import coverage, read_map
from draftscope.errors import UsageError
from draftscope.pipeline.online import OnlineCorpus
from draftscope.states import plain
from draftscope.states.folder import FileSource
from draftscope.states.opening import open_source
from draftscope.states.places import Place, Remote
from draftscope.target.embedded import ensure_target
from draftscope.target.model import load_target
from draftscope.target.parts import TargetParts, read_config, read_parts
from draftscope.target.wiring import Wiring

HELD_OUT = 20
"""Of so many samples the last is held out, where nothing else is."""


@dataclass(slots=True)
class Work:
    """What was asked for.

    Attributes:
        shape: fields of `DraftConfig` that are to differ from the target's proportions.
        target_rope: the draft takes the target's rope parameters.
        said: boundaries that the states say they hold.
    """

    ui: Ui
    ranks: Ranks
    out: Path
    settings: Settings
    shape: dict[str, Any]
    device: str
    max_length: int
    format: str | None
    skip_bad: bool
    compute: str
    draft_vocab: int
    vocab_map: Path | None
    target_rope: bool
    watch: Watch
    said: tuple[int, ...] | None = field(default=None, init=False)

    def run(self, states: Place, heldout: Place | None, target: Path | None, *, online: bool) -> None:
        """Read, train, tell."""
        ui, shape = self.ui, self.shape
        folder = target or ensure_target(report=ui.note)
        raw = read_config(folder)
        vocab = int(raw["vocab_size"])
        size = min(self.draft_vocab, vocab)
        if self.target_rope:
            shape["rope_parameters"] = rope_of(raw, str(folder))
        shape_of(raw, size, **shape)  # what can't be is told before the work
        given = None if self.vocab_map is None else read_map(self.vocab_map, vocab)
        paths = [states] if heldout is None else [states, heldout]
        found: list[Corpus]
        if online:
            found, parts = self._online(paths, folder)
        else:
            parts = read_parts(folder)
            found = self._files(paths, parts)
        corpus, held = split(found[0], HELD_OUT) if heldout is None else found
        if corpus.lengths:
            shape["slots"] = corpus.shape[0] - 1
            self._check_boundaries(parts)
        counts = token_counts(corpus, vocab)
        if given is None:
            d2t, _, covered = draft_vocabulary(counts, size)
        else:
            d2t, size, covered = given, len(given), coverage(given, counts, str(self.vocab_map))
        config = shape_of(raw, size, **shape)
        ui.note(f"{len(corpus.lengths)} samples, {int(counts.sum())} answer tokens, {len(held.lengths)} held out; "
                f"the draft vocabulary of {size} covers {covered:.2%} of them")
        keep(f"the state is kept in {self.out}; the same command goes on from there")
        with ui.progress("training", None, "steps") as advance:
            shown = 0

            def show(event: Event) -> None:
                nonlocal shown
                if "heldout" in event:
                    ui.note(told(event))
                    return
                advance(event["step"] - shown, total=event["of"],
                        what=f"loss {event['loss']:.3f}, {event['answer_tokens_per_s']:,.0f} tokens/s")
                shown = event["step"]

            result = train(corpus, parts, config, d2t if size < vocab else None, self.out, settings=self.settings, heldout=held,
                           watch=self.watch, device=self.device, ranks=self.ranks, on_event=show)
        if not result.finished:
            stopping.heed()
            raise KeyboardInterrupt
        self._tell(result, {"coverage": covered, "samples": len(corpus.lengths), "heldout_samples": len(held.lengths)})

    def _check_boundaries(self, parts: TargetParts) -> None:
        """Hold what the draft's configuration will name against the slots there are, and against what the files say they are.

        Nobody can tell boundaries from the files alone, so where these say something else than what is in effect it is asked.
        """
        given, slots = self.shape.get("boundaries"), self.shape["slots"]
        if given is not None and len(given) != slots:
            raise UsageError(f"--boundaries names {len(given)}, the states have {slots} slots",
                             remedy="Name one boundary for each slot")
        said = self.said
        if given is None and said is not None and slots == 3 and said != default_boundaries(parts.layers):
            told, usual = (",".join(map(str, some)) for some in (said, default_boundaries(parts.layers)))
            raise UsageError(f"the states say that they hold boundaries {told}, and the draft would be written for {usual}, the "
                             "target's defaults, which engines then give it",
                             remedy=f"Say what they hold: --boundaries {told}, or {usual} where the files are wrong")

    def _tell(self, result: Result, facts: dict[str, Any]) -> None:
        figures = result.heldout
        ending = "" if figures is None else f"; held-out accept length {figures.figure:.2f} (K = {figures.k})"
        if result.stopped:
            ending += "; ended early, the best draft is in best/"
        self.ui.print(f"{result.steps} steps; the draft is in {self.out / 'draft'}{ending}")
        self.ui.write_json({
            "schema": "draftscope.train/1", "folder": str(self.out), "steps": result.steps, **facts,
            "stopped_early": result.stopped, "loss": result.losses[-1] if result.losses else None,
            "heldout": None if figures is None else {"k": figures.k, "rows": figures.rows, "joint": figures.joint,
                                                     "length": figures.length, "rounds": figures.rounds, "walk": figures.walk},
        })

    def _files(self, paths: list[Place], parts: TargetParts) -> list[Corpus]:
        ui, fitting = self.ui, Fitting(parts, self.max_length, self.skip_bad)
        found: list[Corpus] = []
        with ui.progress("reading", None, "tokens") as advance:
            for path in paths:
                source = open_source(path, self.format, kind="samples", skip_bad=self.skip_bad)
                if source.kind != "samples" or not isinstance(source, FileSource):
                    raise UsageError("holds a capture, not training data", where=str(path),
                                     remedy="Make training data with `draftscope extract`")
                self.said = self.said or claimed(source)
                corpus = FileCorpus.of(source, fitting, self.out / "choices", ranks=self.ranks, on_tokens=advance)
                ui.note_source(source, skipped=0)
                if source.skipped:
                    first = source.skipped[0]
                    ui.note(f"{len(source.skipped)} files passed over, the first: {first.path}: {first.why}")
                if corpus.normed:
                    ui.note(f"the last state of {corpus.normed} of {len(corpus.lengths)} samples is after the final norm, which "
                            "is not applied again")
                found.append(corpus)
        return found

    def _online(self, paths: list[Place], folder: Path) -> tuple[list[Corpus], TargetParts]:
        model = load_target(folder, getattr(torch, self.compute), self.device)
        boundaries = self.shape.get("boundaries")
        wiring = None if boundaries is None else Wiring.of(boundaries)
        found: list[Corpus] = []
        for path in paths:
            if isinstance(path, Remote):
                raise UsageError("conversations are read from local files", where=str(path), remedy="Copy them here")
            corpus = OnlineCorpus.of(model, conversations_of(path, model), wiring=wiring, max_length=self.max_length,
                                     origin=str(path))
            if corpus.skipped:
                first = corpus.skipped[0]
                self.ui.note(f"{len(corpus.skipped)} lines passed over, the first: line {first.index + 1}: {first.why}")
            found.append(corpus)
        return found, model.parts


def claimed(source: FileSource[Any]) -> tuple[int, ...] | None:
    """Boundaries of the slots as the metadata of plain files has them; other formats count layers in ways of their own."""
    try:
        ids = json.loads(source.meta["layer_ids"])
    except (KeyError, TypeError, ValueError):
        return None
    if source.format != plain.NAME or not isinstance(ids, list) or not all(type(i) is int for i in ids):
        return None
    return tuple(ids[:-1])


def told(event: Mapping[str, Any]) -> str:
    """One line about a step or an evaluation of the log."""
    if "heldout" in event:
        figures = event["heldout"]
        joint = " ".join(f"{share:.3f}" for share in figures["joint"])
        walk = figures.get("walk")
        length = figures["length"] if walk is None else walk
        return f"step {event['step']}: held-out accept length {length:.3f}, joint acceptance {joint}"
    accuracy = " ".join("-" if share is None else f"{share:.3f}" for share in event["accuracy"])
    return (f"step {event['step']}/{event['of']}: loss {event['loss']:.3f}, accuracy {accuracy}, "
            f"{event['answer_tokens_per_s']:.0f} answer tokens/s, {event['left_s'] / 60:.0f} min left")
