"""What cases share is made once: passes of the target over the same tokens, and captures that a fault does not touch."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path

from torch import Tensor

from draftscope.eagle3.generated import Summary
from draftscope.faults.plant import Plant
from draftscope.faults.rig import Rig
from draftscope.target.cache import Branches, RaggedCache
from draftscope.target.model import Run, Target

MOST_BYTES, MOST_CAPTURES = 1 << 30, 8


class Remembering(Target):
    """A target that keeps what passes without a cache gave, by the tokens and the states asked for.

    Whoever gets such states must not write to them, as with any target.

    Args:
        most: bytes kept; what was used longest ago goes first.
    """

    def __init__(self, target: Target, most: int = MOST_BYTES) -> None:
        super().__init__(target.model, target.folder)
        self.partials, self.head, self._most, self._bytes = target.partials, target.head, most, 0
        self._kept: OrderedDict[tuple[object, ...], Run] = OrderedDict()

    def run(
        self, ids: Tensor, streams: set[int], partials: set[int], *, cache: RaggedCache | None = None, rows: Tensor | None = None,
        branches: Branches | None = None,
    ) -> Run:
        if cache is not None:
            return super().run(ids, streams, partials, cache=cache, rows=rows, branches=branches)
        key = (tuple(ids.shape), ids.numpy().tobytes(), frozenset(streams), frozenset(partials))
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            found = super().run(ids, streams, partials)
            self._kept[key] = found
            self._bytes += _size(found)
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= _size(self._kept.popitem(last=False)[1])
        return self._kept[key]


def _size(run: Run) -> int:
    return sum(t.nbytes for t in (*run.streams.values(), *run.partials.values(), run.post))


@dataclass
class KeptRig(Rig):
    """A rig that serves a checkpoint under one wiring and reading once, and hands out copies of the capture.

    Attributes:
        kept: the last captures made or handed out, by what reached the engine: their folders and counts.
    """

    folder: Path = field(default_factory=Path)
    kept: OrderedDict[bytes, tuple[Path, Summary]] = field(default_factory=OrderedDict)

    def serve(self, plant: Plant, draft_folder: Path, folder: Path) -> Summary:
        key = self._key(plant, draft_folder)
        if key not in self.kept or not self.kept[key][0].is_dir():  # it goes with the folder of its exercise
            store = self.folder / "kept" / key.hex()
            shutil.rmtree(store, ignore_errors=True)
            self.kept[key] = (store, super().serve(plant, draft_folder, store))
        self.kept.move_to_end(key)
        while len(self.kept) > MOST_CAPTURES:
            shutil.rmtree(self.kept.popitem(last=False)[1][0])
        store, summary = self.kept[key]
        # Copies: what comes after may rewrite them.
        shutil.copytree(store, folder, dirs_exist_ok=True)
        return summary

    def _key(self, plant: Plant, draft_folder: Path) -> bytes:
        """By everything that can reach the engine: what the writer of the training data does is none of it."""
        reaching = replace(plant, train=plant.serve, train_ranks=(), last=(), loss_mask="kept", labels=(), heldout="")
        own = {f.name: getattr(self, f.name) for f in fields(Rig) if f.name not in ("target", "conversations")}
        told = blake2b(repr((reaching, own, str(self.target.dtype))).encode(), digest_size=16)
        for path in sorted(p for p in draft_folder.rglob("*") if p.is_file()):
            told.update(path.name.encode() + path.read_bytes())
        return told.digest()
