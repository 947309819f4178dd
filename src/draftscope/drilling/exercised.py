"""The pair that is exercised: a target, its draft, prompts to serve, conversations that it is said to have learned from."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import torch

from draftscope.boundaries import default_boundaries
from draftscope.drilling.cases import Setting
from draftscope.drilling.kept import KeptRig, Remembering
from draftscope.eagle3.checkpoint import load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Summary
from draftscope.embedded.pair import DRAFT, spread, training_sample
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.rig import Conversation
from draftscope.pipeline.prompts import read_prompts
from draftscope.target.embedded import ensure_target
from draftscope.target.model import Target, load_target
from draftscope.target.wiring import Wiring

READ = 4096
"""Prompts read of a file at most."""
LEAST = 4
"""Prompts below which nothing could be left over for conversations."""


@dataclass
class Pair:
    """A healthy pair, ready to be spoilt.

    Attributes:
        digest: of everything that its outcomes rest on.
        prompts: token ids to be served; conversations: the writer of the training data gets these.
        k, max_new: of the plain run.
        theta: the base of the draft's rotary table.
    """

    name: str
    target: Target
    draft: Path
    boundaries: tuple[int, ...]
    prompts: Sequence[list[int]]
    conversations: Sequence[Conversation]
    digest: str
    k: int = 3
    max_new: int = 48
    theta: float = 1e4
    _coarse: Target | None = None
    _kept: OrderedDict[bytes, tuple[Path, Summary]] = field(default_factory=OrderedDict)

    def rig(self, setting: Setting, folder: Path) -> KeptRig:
        """The rig of a setting, which keeps captures below a folder, the same one for all rigs of a pair."""
        prompts = self.prompts if setting.prompts is None else [self.prompts[i] for i in setting.prompts]
        target = self.target if setting.dtype == "float32" else self._bfloat16()
        return KeptRig(
            target, self.draft, prompts, self.conversations, k=setting.k or self.k, max_new=setting.max_new or self.max_new,
            rows=setting.rows or 8, stop_ids=self.target.stop_ids, folder=folder, kept=self._kept,
        )

    def _bfloat16(self) -> Target:
        """The same target as engines run it; held against the one in float32, as a user's capture is."""
        if self._coarse is None:
            self._coarse = Remembering(load_target(self.target.folder, torch.bfloat16))
        return self._coarse


def open_pair(
    target: Path | None, draft: Path | None, prompts: Path | None, name: str | None, report: Callable[[str], None],
    *, served: int = 16, max_new: int = 48, learned: int = 24,
) -> Pair:
    """The pair of these files, or the embedded one where none are named; its own draft may be replaced (`draft`).

    Args:
        target: a folder with weights; None = the embedded target.
        prompts: JSONL as `generate` takes it, or the JSON of `recipes/tiny` (`train` and `heldout`, lists of token ids). Half of
            a JSONL's prompts are answered by the target to be the conversations that the draft learned from.
        served, learned: the most prompts served, and the most conversations.

    Raises:
        UsageError: a target without prompts for it, or without its draft.
    """
    embedded = target is None
    if not embedded and (draft is None or prompts is None):
        raise UsageError("a target needs its draft and prompts", remedy="Give --draft and --prompts with --target")
    folder = ensure_target(report=report) if target is None else target
    # Not packed: faults that round the target's matrices need them as they are.
    model = Remembering(load_target(folder))
    checkpoint = draft or DRAFT
    config = load_checkpoint(checkpoint, target_layers=model.layers).config
    boundaries = config.boundaries or default_boundaries(model.layers)
    if prompts is not None:
        asked, taught = _read(prompts, model, served, learned)
        report(f"answering {len(taught)} prompts, which are then what the draft is said to have learned from")
        answers = generate(model, None, taught, wiring=Wiring.of(boundaries), max_new=64, stop_ids=model.stop_ids, rows=12)
        conversations = [Conversation(p + a.token_ids, len(p)) for p, a in zip(taught, answers, strict=True)]
    else:
        tokenizer = model.tokenizer
        asked = [
            tokenizer.encode(tokenizer.apply_chat_template(p.messages, tokenize=False, add_generation_prompt=True))
            for p in spread(served)
        ]
        conversations = [Conversation(*c) for c in training_sample()[:learned]]
    told = blake2b(json.dumps([asked, [c.token_ids for c in conversations], boundaries, max_new]).encode(), digest_size=8)
    for path in sorted([*checkpoint.glob("*.safetensors"), folder / "config.json", *checkpoint.glob("*.json")]):
        told.update(path.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        told.update(f"{path.name} {path.stat().st_size}".encode())
    called = name or ("embedded" if embedded else folder.parent.name if folder.name == "target" else folder.name)
    return Pair(called, model, checkpoint, boundaries, asked, conversations, told.hexdigest(), max_new=max_new,
                theta=float(config.rope_parameters.get("rope_theta", 1e4)))


def _read(path: Path, target: Target, served: int, learned: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to serve, and prompts whose answers the draft learned from."""
    if path.suffix == ".json":
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            return [list(map(int, p)) for p in held["heldout"]][:served], [list(map(int, p)) for p in held["train"]][:learned]
        except (ValueError, KeyError, TypeError):
            raise DraftscopeError("holds no lists of token ids `train` and `heldout`", where=str(path),
                                  remedy="Give JSONL of prompts, or the prompts.json that recipes/tiny leaves") from None
    found = [p.token_ids for p in read_prompts(path, target, limit=READ)]
    if len(found) < LEAST:
        raise DraftscopeError(f"holds {len(found)} prompts", where=str(path), remedy=f"The exercise needs {LEAST} or more")
    # Shuffled, as files are often sorted by kind, or have kinds in turn.
    random.Random(0).shuffle(found)
    half = len(found) // 2
    return found[:half][:served], found[half:][:learned]
