"""Training an EAGLE-3 draft with training-time test: resumable, deterministic, on data of any size.

A run lives in one folder: `log.jsonl`, `training.safetensors` (weights and optimizer state), `draft/` (native checkpoint of the
last epoch) and `best/` (of the evaluation with the longest held-out accept length). Columns of the features are divided by their
root mean square while training, which is what makes one learning rate fit all slots; the factor is folded into `fc` when a
checkpoint is exported.
"""

from __future__ import annotations

import math
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.eagle3.batches import ahead, batch_order
from draftscope.eagle3.checkpoint import save_native, target_ids
from draftscope.eagle3.collate import Collate, Packed
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.corpus import Corpus, Held, column_rms, contents, identity
from draftscope.eagle3.descent import Descent
from draftscope.eagle3.examples import Example
from draftscope.eagle3.heldout import HeldOut, evaluate
from draftscope.eagle3.interrupts import undisturbed
from draftscope.eagle3.loss import Loss, normalisers, ttt_loss
from draftscope.eagle3.model import Draft
from draftscope.eagle3.parallel import ALONE, Ranks
from draftscope.eagle3.runstate import RunFolder
from draftscope.eagle3.settings import Settings as Settings
from draftscope.eagle3.start import folded, new_draft
from draftscope.errors import DraftscopeError
from draftscope.target.parts import TargetParts

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Watch:
    """How a run is looked after; none of it changes its steps, but for when it ends.

    Attributes:
        evaluate_every: steps between evaluations on held-out data, besides those at the ends of epochs.
        patience: evaluations without a longer held-out accept length after which the run ends; 0 = never.
        save_minutes: how often the state is saved, besides the ends of epochs.
        in_flight: bytes of batches loaded ahead and in use.
    """

    evaluate_every: int = 100
    patience: int = 0
    save_minutes: float = 5.0
    in_flight: int = 2**29


@dataclass(slots=True)
class Result:
    """What a run came to.

    Attributes:
        draft: the trained draft, the column factors folded in, on the CPU.
        finished: false where it was interrupted; call again to go on.
        stopped: it ended early, for want of patience.
    """

    draft: Draft
    steps: int
    finished: bool
    losses: list[float]
    heldout: HeldOut | None
    history: list[HeldOut] = field(default_factory=list)
    stopped: bool = False


def train(examples: Corpus | Sequence[Example], parts: TargetParts, config: DraftConfig, d2t: Tensor | None, out: Path, *,
          settings: Settings | None = None, heldout: Corpus | Sequence[Example] = (), extra: Mapping[str, Any] | None = None,
          watch: Watch | None = None, device: str | torch.device = "cpu", ranks: Ranks = ALONE,
          on_event: Callable[[Event], None] | None = None) -> Result:
    """Train a draft, or go on with what `out` holds: the batches, and on as many threads the weights, are then the same.

    Args:
        config: its `boundaries` say what the slots are; written to config.json unless they are the target's defaults.
        d2t: [D] offsets; None where the draft has the target's vocabulary.
        extra: further keys for the exported config.json.
        device: where the draft is and the teacher is computed.
        ranks: this process among those that train together; the first one writes.
        on_event: gets what goes to the log: a record per step and per evaluation; at `ends_epoch` `draft/` is that epoch's.

    Raises:
        DraftscopeError: no examples, states that do not fit the configuration, nothing that could be taught, a loss that is not
            finite (sample and tensor are named), a disk that refuses, or a folder that holds a run over other data or settings.
            What was saved before stays as it was.
    """
    corpus, aside = (Held(given) if isinstance(given, Sequence) else given for given in (examples, heldout))
    run = _Run(corpus, parts, config, d2t, out, settings or Settings(), aside, dict(extra or {}), watch or Watch(),
               torch.device(device), ranks, on_event)
    finished = True
    try:
        run.loop()
    except KeyboardInterrupt:
        finished = False
        run.save()
    last = run.history[-1] if run.history else None
    return Result(run.exported(), run.place.step, finished, run.losses, last, run.history, run.place.stopped)


class _Run:
    def __init__(self, corpus: Corpus, parts: TargetParts, config: DraftConfig, d2t: Tensor | None, out: Path,
                 settings: Settings, heldout: Corpus, extra: dict[str, Any], watch: Watch, device: torch.device, ranks: Ranks,
                 on_event: Callable[[Event], None] | None) -> None:
        if not corpus.lengths:
            raise DraftscopeError("nothing to train on: no sample has two answer tokens in a row",
                                  remedy="Look at the loss mask with `draftscope inspect`")
        for some in (corpus, heldout):
            if not some.lengths:
                continue
            entries, width = some.shape
            if entries != config.slots + 1 or width != config.target_hidden_size:
                raise DraftscopeError(f"states hold {entries} entries of width {width}, the draft takes {config.slots} slots of "
                                      f"{config.target_hidden_size} and needs the last state", where=some.name(0))
        self.corpus, self.heldout, self.parts, self.watch, self.ranks = corpus, heldout, parts, watch, ranks
        self.settings, self.out, self.d2t, self.extra, self.on_event = settings, out, d2t, extra, on_event
        ids = target_ids(d2t, config)
        self.rms = column_rms(corpus)
        # A norm before `fc` already takes the scale out; without `fc` there is nothing to fold it into.
        bare = not settings.scaled or config.norm_before_fc or config.fc_norm or not config.use_aux_hidden_state
        self.scale = None if bare else self.rms
        self.draft = new_draft(config, parts, ids, self.scale, settings.seed, near_mean=settings.scaled).train().to(device)
        assert self.draft.embedding is not None
        self.draft.embedding = self.draft.embedding.to(device)
        self.collate = Collate.of(parts, ids, settings, self.scale, device)
        self.descent = Descent(self.draft, settings)
        self.lengths = corpus.lengths
        self.ends = list(accumulate(len(self._order(epoch)) for epoch in range(settings.epochs)))  # steps after which epochs end
        self.total = self.ends[-1] if self.ends else 0
        self.losses, self.history = list[float](), list[HeldOut]()
        self.folder = RunFolder(out, {
            "settings": asdict(settings), "data": identity(corpus), "config": config.model_dump(mode="json"),
            "sample contents": contents(corpus), "held-out samples": contents(heldout), "target": parts.fingerprint(),
            "vocabulary map": None if d2t is None else f"{zlib.crc32(d2t.long().numpy().tobytes()):08x}",
        })
        self.place = self.folder.place
        self._resume()

    def _resume(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        if self.ranks.first:
            tensors = self.folder.restore()
            self.ranks.barrier()
        else:
            self.ranks.barrier()
            tensors = self.folder.restore(trim=False)
        self.place = self.folder.place
        if tensors is not None:
            try:
                self.descent.restore(tensors)
            except (KeyError, RuntimeError) as error:
                raise DraftscopeError(f"not the state of this run ({error})", where=str(self.folder.state_file),
                                      remedy="Train into another folder") from None
        self.ranks.barrier()

    def loop(self) -> None:
        watch, place = self.watch, self.place
        saved = began = time.monotonic()
        tokens, first, taught = 0, place.step, 0
        plan = self._plan(place.step)
        batches = ahead(((cost, make) for _, _, _, cost, make in self._plan(place.step)), watch.in_flight)
        try:
            self._settle()  # an evaluation that an interruption has cut short
            for epoch, ends, chosen, _, _ in plan:
                if place.stopped:
                    return
                packed = next(batches)
                with undisturbed():
                    loss, norm, answers = self._step(packed, chosen)
                    taught += sum(loss.rows)
                    tokens += answers
                    took = time.monotonic() - began
                    self.losses.append(float(loss.total))
                    if ends and epoch == 0 and first == 0 and not taught:
                        raise DraftscopeError(
                            "no row of the data can be taught: no answer token's target lies in the draft vocabulary",
                            where=self.corpus.name(0), remedy="Take a larger --draft-vocab, or look at the loss mask",
                        )
                    if ends:
                        self._export(self.out / "draft")
                    self._record({
                        "step": place.step, "of": self.total, "epoch": epoch, "ends_epoch": ends, "loss": self.losses[-1],
                        "losses": [None if math.isnan(x) else x for x in loss.steps],
                        "accuracy": [c / r if r else None for c, r in zip(loss.correct, loss.rows, strict=True)],
                        "rows": loss.rows, "grad_norm": norm, "learning_rate": self._rate(place.step - 1),
                        "answer_tokens_per_s": tokens / max(took, 1e-9),
                        "left_s": took / (place.step - first) * (self.total - place.step),
                        **({"resumed": True} if first and place.step == first + 1 else {}),
                    })
                del packed  # asking for the next batch says that this one is done with
                self._settle()
                if ends or place.stopped or time.monotonic() - saved > watch.save_minutes * 60:
                    self.save()
                    saved = time.monotonic()
        finally:
            batches.close()

    def _order(self, epoch: int) -> list[list[int]]:
        return batch_order(self.lengths, self.settings.batch_tokens, self.settings.seed, epoch)

    def _plan(self, done: int) -> Iterator[tuple[int, bool, list[int], int, Callable[[], Packed | None]]]:
        """Epoch, whether the batch ends it, its examples, and this process's share: cost in bytes, and what packs it."""
        entries, width = self.corpus.shape
        # Stored states are copied into the batch; its features and the teacher's logits are wider where the draft is.
        per_token = entries * width * (2 * self.corpus.itemsize + 4)
        for epoch in range(self.settings.epochs):
            order = self._order(epoch)
            for number, chosen in enumerate(order):
                if done > 0:
                    done -= 1
                    continue
                longest = max(self.lengths[i] for i in chosen)
                own = chosen[self.ranks.rank :: self.ranks.world]

                def make(own: list[int] = own, longest: int = longest) -> Packed | None:
                    return self.collate.pack(self.corpus.load(own), longest) if own else None

                yield epoch, number == len(order) - 1, chosen, len(own) * longest * per_token, make

    def _step(self, packed: Packed | None, chosen: list[int]) -> tuple[Loss, float, int]:
        """A step over this process's share of a batch; the loss, as over the whole, and the answer tokens in it."""
        settings, ranks = self.settings, self.ranks
        self.descent.zero_grad()
        steps = settings.ttt_steps
        batch = None if packed is None else self.collate.finish(packed)
        counts = torch.zeros(steps, dtype=torch.int64) if batch is None else normalisers(batch, settings.normaliser).cpu()
        counts = ranks.sum(counts)
        if batch is None:
            loss = Loss(torch.zeros(()), [0.0] * steps, [0] * steps, [0] * steps)
        else:
            if settings.noise:
                self._add_noise(batch.features, batch.names, packed)
            loss = ttt_loss(self.draft, batch, settings.decay, getattr(torch, settings.precision), kind=settings.loss,
                            normaliser=settings.normaliser, counts=counts, first_position=settings.first_position,
                            window_moves=settings.window_moves)
        figures = self._pooled(loss, 0 if packed is None else packed.answers, counts)
        bad = not math.isfinite(figures[0].total)
        if not bad and any(figures[0].rows):
            if loss.total.requires_grad:
                loss.total.backward()
            ranks.sum_gradients(self.descent.parameters)
            norm = self.descent.step(self._rate(self.place.step))
            bad = not math.isfinite(norm)
        else:
            norm = 0.0
        if bad:
            self._not_finite(chosen)
        self.place.step += 1
        return figures[0], norm, figures[1]

    def _pooled(self, loss: Loss, answers: int, counts: Tensor) -> tuple[Loss, int]:
        """The figures of all processes, as plain numbers."""
        steps = [0.0 if math.isnan(x) else x for x in loss.steps]
        held = [float(loss.total.detach()), float(answers), *steps, *map(float, loss.rows), *map(float, loss.correct)]
        total, answers_of_all, *rest = self.ranks.sum(torch.tensor(held, dtype=torch.float64)).tolist()
        k = len(steps)
        losses = [x if count else math.nan for x, count in zip(rest[:k], counts.tolist(), strict=True)]
        pooled = Loss(torch.tensor(total, dtype=torch.float64), losses, [int(x) for x in rest[k : 2 * k]],
                      [int(x) for x in rest[2 * k :]])
        return pooled, int(answers_of_all)

    def _add_noise(self, features: Tensor, names: tuple[str, ...], packed: Packed | None) -> None:
        """By seed, step and sample alone, whatever batch the sample is in."""
        settings = self.settings
        assert packed is not None
        for b, name in enumerate(names):
            draw = torch.Generator().manual_seed(zlib.crc32(f"{settings.seed}:{self.place.step}:{name}".encode()))
            shape = (int(packed.lengths[b]), *features.shape[2:])
            if settings.noise_kind == "normal":
                noise = torch.randn(shape, generator=draw)
            else:
                noise = 2 * torch.rand(shape, generator=draw) - 1
            if self.scale is None:
                noise *= self.rms
            features[b, : shape[0]] += (noise * settings.noise).to(features.device, features.dtype)

    def _rate(self, step: int) -> float:
        settings = self.settings
        warmup = settings.warmup if settings.warmup_share is None else int(settings.warmup_share * self.total)
        if step < warmup:
            return settings.learning_rate * (step + 1) / warmup
        share = (step - warmup) / max(self.total - warmup, 1)
        fall = {"cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share, "constant": 1.0}[settings.schedule]
        return settings.learning_rate * (settings.final_rate + (1 - settings.final_rate) * fall)

    def _not_finite(self, chosen: list[int]) -> None:
        """Raises DraftscopeError, in every process."""
        told = ""
        for example in self.corpus.load(chosen[self.ranks.rank :: self.ranks.world]):
            bad = (~example.states.isfinite()).any(-1).nonzero()
            if len(bad):
                token, entry = bad[0].tolist()
                which = f"slot {entry}" if entry < example.states.shape[1] - 1 else "the last state"
                told = told or f"{example.name}\0the states of token {token} are not finite ({which})"
        weights = [name for name, p in self.draft.named_parameters() if not bool(p.isfinite().all())]
        for found in self.ranks.all_names(told):
            where, what = found.split("\0")
            raise DraftscopeError(what, where=where,
                                  remedy="Take the sample out, or extract it again. The state saved last is kept")
        what = f"{weights[0]} is not finite" if weights else "a gradient or the loss itself overflowed"
        raise DraftscopeError(f"the loss is not finite at step {self.place.step}: {what}",
                              where=", ".join(self.corpus.name(i) for i in chosen[:8]),
                              remedy="Try a lower learning rate. The state saved last is kept")

    def _settle(self) -> None:
        """Evaluate after the step taken last, where that is due and not done."""
        place = self.place
        ends = place.step in self.ends
        due = place.step > 0 and (ends or place.step % self.watch.evaluate_every == 0)
        if not self.heldout.lengths or not due or place.evaluated >= place.step:
            return
        self.draft.eval()
        settings = self.settings
        figures = evaluate(self.draft, self.heldout, self.collate, settings.ttt_steps, settings.batch_tokens, self.ranks)
        self.draft.train()
        with undisturbed():
            self.history.append(figures)
            place.evaluated = place.step
            if figures.figure > place.best:
                place.best, place.stale = figures.figure, 0
                self._export(self.out / "best")
            else:
                place.stale += 1
            place.stopped = 0 < self.watch.patience <= place.stale
            if place.stopped and not ends:
                self._export(self.out / "draft")
            self._record({"step": place.step, "epoch": bisect_left(self.ends, place.step), "heldout": asdict(figures),
                          "best": place.best, "stale": place.stale})

    def exported(self) -> Draft:
        """The draft for features as they come, on the CPU."""
        made = folded(self.draft, self.scale).to("cpu")
        assert made.embedding is not None
        made.embedding = made.embedding.cpu()
        return made

    def _export(self, folder: Path) -> None:
        if self.ranks.first:
            save_native(folder, self.exported(), self.d2t, target_layers=self.parts.layers, extra=self.extra)

    def _record(self, event: dict[str, Any]) -> None:
        if self.ranks.first:
            self.folder.record(event)
            if self.on_event is not None:
                self.on_event(event)

    def save(self) -> None:
        """Weights, optimizer state and place in the run, replaced atomically."""
        if self.ranks.first:
            with undisturbed():
                self.folder.save(self.descent.tensors())
