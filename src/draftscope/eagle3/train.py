"""Training an EAGLE-3 draft with training-time test: resumable, deterministic, on plain training data.

A run lives in one folder: `log.jsonl`, `training.safetensors` (weights and optimizer state), `teacher.safetensors` (the
target's choices), `draft/` (native checkpoint of the last epoch) and `best/` (of the epoch with the longest held-out accept
length). Columns of the features are divided by their root mean square while training, which is what makes one learning rate
fit all slots; the factor is folded into `fc` when a checkpoint is exported.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftscope.eagle3.checkpoint import save_native, target_ids
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.descent import Descent, Optimizer
from draftscope.eagle3.examples import Collate, Example, batch_order, column_rms
from draftscope.eagle3.heldout import HeldOut, evaluate
from draftscope.eagle3.loss import Alignment, Loss, ttt_loss
from draftscope.eagle3.model import Draft
from draftscope.eagle3.start import folded, new_draft
from draftscope.errors import DraftscopeError
from draftscope.target.parts import TargetParts

Event = Mapping[str, Any]
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train.

    Attributes:
        batch_tokens: tokens of a batch once padded.
        learning_rate, head_rate: its peak; the head, which starts as the target's, takes `head_rate` times as much.
        warmup, final_rate: steps of linear warmup, then a cosine down to `final_rate` times the peak.
        decay: weight of step k is decay^k.
        noise: standard deviation of the noise on features, in units of each column's root mean square.
        alignment: which rows are supervised (`loss.supervised_rows`).
        optimizer: of the matrices inside the draft (`descent.Descent`).
        precision: of the operands of the matrix products; weights and sums stay in float32.
    """

    ttt_steps: int = 3
    epochs: int = 10
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    head_rate: float = 0.2
    warmup: int = 50
    final_rate: float = 0.02
    weight_decay: float = 0.02
    clip: float = 1.0
    decay: float = 0.8
    noise: float = 0.0
    alignment: Alignment = "served"
    optimizer: Optimizer = "adamw"
    precision: Precision = "float32"
    seed: int = 0


@dataclass(slots=True)
class Result:
    """What a run came to.

    Attributes:
        draft: the trained draft, the column factors folded in.
        finished: false where it was interrupted; call again to go on.
    """

    draft: Draft
    steps: int
    finished: bool
    losses: list[float]
    heldout: HeldOut | None
    history: list[HeldOut] = field(default_factory=list)


def train(examples: Sequence[Example], parts: TargetParts, config: DraftConfig, d2t: Tensor | None, out: Path, *,
          settings: Settings | None = None, heldout: Sequence[Example] = (), extra: Mapping[str, Any] | None = None,
          evaluate_every: int = 100, save_minutes: float = 5.0, on_event: Callable[[Event], None] | None = None) -> Result:
    """Train a draft, or go on with what `out` holds: the batches, and on as many threads the weights, are then the same.

    Args:
        config: its `boundaries` say what the slots are; written to config.json unless they are the target's defaults.
        d2t: [D] offsets; None where the draft has the target's vocabulary.
        extra: further keys for the exported config.json.
        on_event: gets what goes to the log: a record per step and per evaluation; at `ends_epoch` `draft/` is that epoch's.

    Raises:
        DraftscopeError: no examples, states that do not fit the configuration, a loss that is not finite (the sample is
            named), or a folder that holds a run over other data or settings.
    """
    run = _Run(examples, parts, config, d2t, out, settings or Settings(), heldout, dict(extra or {}), on_event)
    finished = True
    try:
        run.loop(evaluate_every, save_minutes)
    except KeyboardInterrupt:
        finished = False
        run.save()
    last = run.history[-1] if run.history else None
    return Result(folded(run.draft, run.scale), run.step, finished, run.losses, last, run.history)


class _Run:
    def __init__(self, examples: Sequence[Example], parts: TargetParts, config: DraftConfig, d2t: Tensor | None, out: Path,
                 settings: Settings, heldout: Sequence[Example], extra: dict[str, Any],
                 on_event: Callable[[Event], None] | None) -> None:
        if not examples:
            raise DraftscopeError("nothing to train on: no sample has two answer tokens in a row",
                                  remedy="Look at the loss mask with `draftscope inspect`")
        entries, width = examples[0].states.shape[1], examples[0].states.shape[2]
        if entries != config.slots + 1 or width != config.target_hidden_size:
            raise DraftscopeError(f"states hold {entries} entries of width {width}, the draft takes {config.slots} slots of "
                                  f"{config.target_hidden_size} and needs the last state", where=examples[0].name)
        self.examples, self.heldout, self.parts = examples, heldout, parts
        self.settings, self.out, self.d2t, self.extra, self.on_event = settings, out, d2t, extra, on_event
        self.ids = target_ids(d2t, config)
        self.rms = column_rms(examples)
        # A norm before `fc` already takes the scale out; without `fc` there is nothing to fold it into.
        bare = config.norm_before_fc or config.fc_norm or not config.use_aux_hidden_state
        self.scale = None if bare else self.rms
        self.draft = new_draft(config, parts, self.ids, self.scale, settings.seed).train()
        self.collate = Collate.of(parts, self.ids, settings.ttt_steps, settings.alignment, self.scale)
        self.descent = Descent(self.draft, settings.optimizer, weight_decay=settings.weight_decay, head_rate=settings.head_rate,
                               clip=settings.clip)
        lengths = [len(e) for e in examples]
        self.orders = [batch_order(lengths, settings.batch_tokens, settings.seed, epoch) for epoch in range(settings.epochs)]
        self.total = sum(map(len, self.orders))
        self.answer_tokens = sum(int(e.answer.sum()) for e in examples)
        self.step, self.losses, self.history = 0, list[float](), list[HeldOut]()
        self.best = 0.0
        self.identity = f"{zlib.crc32(repr([(e.name, len(e)) for e in examples]).encode()):08x}"
        out.mkdir(parents=True, exist_ok=True)
        self._resume()

    def loop(self, evaluate_every: int, save_minutes: float) -> None:
        saved = began = time.monotonic()
        tokens, first = 0, self.step
        done = 0
        for epoch, order in enumerate(self.orders):
            for number, chosen in enumerate(order):
                done += 1
                if done <= self.step:
                    continue
                loss, norm = self._step([self.examples[i] for i in chosen])
                tokens += sum(int(self.examples[i].answer.sum()) for i in chosen)
                took = time.monotonic() - began
                self.losses.append(float(loss.total.detach()))
                ends = number == len(order) - 1
                if ends:
                    self._export(self.out / "draft")
                self._record({
                    "step": self.step, "of": self.total, "epoch": epoch, "ends_epoch": ends, "loss": self.losses[-1],
                    "losses": [None if math.isnan(x) else x for x in loss.steps],
                    "accuracy": [c / r if r else None for c, r in zip(loss.correct, loss.rows, strict=True)], "rows": loss.rows,
                    "grad_norm": norm, "learning_rate": self._rate(self.step - 1),
                    "answer_tokens_per_s": tokens / max(took, 1e-9),
                    "left_s": took / (self.step - first) * (self.total - self.step),
                })
                if self.heldout and (ends or self.step % evaluate_every == 0):
                    self._evaluate(epoch)
                if ends or time.monotonic() - saved > save_minutes * 60:
                    self.save()
                    saved = time.monotonic()

    def _step(self, part: list[Example]) -> tuple[Loss, float]:
        settings = self.settings
        batch = self.collate(part)
        if settings.noise:
            draw = torch.Generator().manual_seed(zlib.crc32(f"{settings.seed}:{self.step}".encode()))
            noise = torch.randn(batch.features.shape, generator=draw) * settings.noise
            batch.features += noise if self.scale is not None else noise * self.rms
        self.descent.zero_grad()
        loss = ttt_loss(self.draft, batch, settings.decay, getattr(torch, settings.precision))
        if not any(loss.rows):
            self.step += 1
            return loss, 0.0
        if not math.isfinite(float(loss.total.detach())):
            raise self._not_finite(part)
        loss.total.backward()
        norm = self.descent.step(self._rate(self.step))
        if not math.isfinite(norm):
            raise self._not_finite(part)
        self.step += 1
        return loss, norm

    def _rate(self, step: int) -> float:
        settings = self.settings
        if step < settings.warmup:
            return settings.learning_rate * (step + 1) / settings.warmup
        share = (step - settings.warmup) / max(self.total - settings.warmup, 1)
        return settings.learning_rate * (settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * share)) / 2)

    def _not_finite(self, part: list[Example]) -> DraftscopeError:
        for example in part:
            bad = (~example.states.isfinite()).flatten(1).any(1).nonzero()
            if len(bad):
                return DraftscopeError(f"the states of token {int(bad[0])} are not finite", where=example.name,
                                       remedy="Take the sample out, or extract it again")
        return DraftscopeError(f"the loss is not finite at step {self.step}", where=", ".join(e.name for e in part),
                               remedy="Try a lower learning rate")

    def _evaluate(self, epoch: int) -> None:
        self.draft.eval()
        figures = evaluate(self.draft, self.heldout, self.collate, self.settings.ttt_steps)
        self.draft.train()
        self.history.append(figures)
        self._record({"step": self.step, "epoch": epoch, "heldout": asdict(figures)})
        if figures.length > self.best:
            self.best = figures.length
            self._export(self.out / "best")

    def _export(self, folder: Path) -> None:
        save_native(folder, folded(self.draft, self.scale), self.d2t, target_layers=self.parts.layers, extra=self.extra)

    def _record(self, event: dict[str, Any]) -> None:
        with (self.out / "log.jsonl").open("a") as f:
            f.write(json.dumps(event) + "\n")
        if self.on_event is not None:
            self.on_event(event)

    @property
    def _state_file(self) -> Path:
        return self.out / "training.safetensors"

    def save(self) -> None:
        """Weights, optimizer state and place in the run, replaced atomically."""
        place = {"step": self.step, "best": self.best, "settings": asdict(self.settings), "data": self.identity,
                 "config": self.draft.config.model_dump(mode="json")}
        temporary = self._state_file.with_name(".training.part")
        save_file(self.descent.tensors(), temporary, metadata={"draftscope": json.dumps(place)})
        os.replace(temporary, self._state_file)

    def _resume(self) -> None:
        if not self._state_file.is_file():
            (self.out / "log.jsonl").unlink(missing_ok=True)
            return
        where = str(self._state_file)
        try:
            with safe_open(self._state_file, "pt") as f:
                place = json.loads((f.metadata() or {}).get("draftscope", "{}"))
                tensors = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, ValueError) as error:
            raise DraftscopeError(f"not the state of a run: {error}", where=where, remedy="Train into another folder") from None
        now = {"settings": asdict(self.settings), "data": self.identity, "config": self.draft.config.model_dump(mode="json")}
        with suppress(ValidationError, TypeError):  # a run from before a switch was added has it at its default
            place["config"] = DraftConfig(**place.get("config", {})).model_dump(mode="json")
        for key, value in now.items():
            if place.get(key) != value:
                raise DraftscopeError(f"the folder holds a run over other {key}", where=where, remedy="Train into another folder")
        self.descent.restore(tensors)
        self.step, self.best = place["step"], place["best"]
        self._trim_log()

    def _trim_log(self) -> None:
        """Drop what was logged after the state was saved: those steps are taken again."""
        path = self.out / "log.jsonl"
        if path.is_file():
            lines = path.read_text().splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self.step]
            temporary = path.with_name(".log.part")
            temporary.write_text("".join(line + "\n" for line in kept))
            os.replace(temporary, path)
