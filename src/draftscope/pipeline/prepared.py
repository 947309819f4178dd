"""The folder that `prepare` fills.

`conversations.jsonl` grows by whole lines {"index", "id", "token_ids", "loss_mask", "ended", "of"}; a line half written by an
interrupted run is dropped when the next one begins. `of` changes with what the input line said.
`token_counts.safetensors` counts the answer tokens, `prepare.json` says what was done.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.leftover import save_text, sweep_up
from draftscope.states.tensorfile import save_tensors

LINES, COUNTS, RECORD = "conversations.jsonl", "token_counts.safetensors", "prepare.json"


@dataclass(slots=True)
class Prepared:
    """What is in the folder.

    Attributes:
        counts: [V] int64 of answer tokens.
        own, compared: answer tokens that are the target's argmax, of how many looked at.
        cut: answers that ended by their length.
        skipped: reasons of input lines that gave nothing, with their number and the first line's.
    """

    folder: Path
    conversations: int = 0
    kept: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    cut: int = 0
    own: int = 0
    compared: int = 0
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    skipped: dict[str, tuple[int, int]] = field(default_factory=dict)

    def skip(self, index: int, why: str) -> None:
        count, first = self.skipped.get(why, (0, index))
        self.skipped[why] = (count + 1, first)


class Folder:
    """The conversations written so far; appended to whole line by whole line."""

    def __init__(self, path: Path, settings: Mapping[str, Any], vocab: int) -> None:
        self.prepared = Prepared(path, counts=torch.zeros(vocab, dtype=torch.int64))
        self.settings = dict(settings)
        self.done: dict[int, str] = {}  # input lines that are there, by number: what they said
        self._agree()
        path.mkdir(parents=True, exist_ok=True)
        sweep_up(path)
        self._file = (path / LINES).open("ab")
        self._alone()
        self._recover()
        self._record(finished=False)

    def _alone(self) -> None:
        """Hold the file until this process ends; of two writers each line would be there twice."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise DraftscopeError("is being written by another process", where=str(self.prepared.folder),
                                  remedy="Wait for it, or name another folder") from None
        except OSError:  # a file system without locks
            return

    def _agree(self) -> None:
        record = self.prepared.folder / RECORD
        if not record.is_file():
            if self.prepared.folder.is_dir() and any(self.prepared.folder.iterdir()):
                raise DraftscopeError("holds something else already", where=str(self.prepared.folder), remedy="Name a new folder")
            return
        try:
            held = json.loads(record.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            held = None
        earlier = held.get("settings") if isinstance(held, dict) else None
        differing = sorted(k for k, before in (earlier or {}).items() if before != self.settings.get(k))
        if not isinstance(earlier, dict) or differing:
            raise DraftscopeError(
                f"was prepared with other settings ({', '.join(differing[:4])})", where=str(self.prepared.folder),
                remedy="Name a new folder, or give the settings of before to go on")

    def _recover(self) -> None:
        """Count what is there; a last line that is not whole is cut off.

        Raises:
            DraftscopeError: another line is no conversation. Nothing is changed then.
        """
        lines = self.prepared.folder / LINES
        good = 0
        with lines.open("r+b") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    self._count(row["index"], row["token_ids"], row["loss_mask"], ended=row["ended"], digest=row.get("of", ""))
                except (ValueError, KeyError, TypeError, IndexError, RuntimeError, AttributeError):
                    raise DraftscopeError(f"line {number} is no conversation as `prepare` writes them", where=str(lines),
                                          remedy="Mend or remove that line, or name another folder") from None
                good += len(line)
            file.truncate(good)
        self.prepared.kept = self.prepared.conversations

    def _count(self, index: int, ids: Sequence[int], mask: Sequence[int], *, ended: bool, digest: str) -> None:
        prepared = self.prepared
        answered = torch.tensor(ids)[torch.tensor(mask, dtype=torch.bool)]
        prepared.counts += torch.bincount(answered, minlength=len(prepared.counts))[: len(prepared.counts)]
        prepared.conversations += 1
        prepared.tokens += len(ids)
        prepared.answer_tokens += len(answered)
        prepared.cut += not ended
        self.done[index] = digest

    def add(self, index: int, name: str, ids: Sequence[int], mask: Sequence[bool], *, ended: bool, digest: str = "") -> None:
        """Append one conversation. Raises DraftscopeError where the disk refuses."""
        marks = [int(m) for m in mask]
        row = {"index": index, "id": name, "token_ids": list(ids), "loss_mask": marks, "ended": ended, "of": digest}
        try:
            self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise DraftscopeError(f"cannot be written ({error.strerror})", where=str(self.prepared.folder / LINES),
                                  remedy="Make room; the same command goes on from there") from None
        self._count(index, ids, marks, ended=ended, digest=digest)

    def close(self, *, finished: bool) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        save_tensors(self.prepared.folder / COUNTS, {"counts": self.prepared.counts}, {})
        self._record(finished=finished)

    def _record(self, *, finished: bool) -> None:
        p = self.prepared
        held = {
            "schema": "draftscope.prepare/1", "settings": self.settings, "finished": finished, "conversations": p.conversations,
            "tokens": p.tokens, "answer_tokens": p.answer_tokens, "cut": p.cut, "own": p.own, "compared": p.compared,
            "skipped": {why: {"lines": count, "first": first} for why, (count, first) in p.skipped.items()},
        }
        save_text(p.folder / RECORD, json.dumps(held, indent=1) + "\n")
