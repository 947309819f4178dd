"""Conversations to plain training data: the target's states at the draft's slots, and its last state, for every token."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.boundaries import Boundary, default_boundaries
from draftscope.errors import DraftscopeError, UsageError
from draftscope.pipeline.conversations import Conversation, Unusable
from draftscope.states.leftover import save_text, sweep_up
from draftscope.states.plain import write_sample
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Sample
from draftscope.target.model import Target, out_of_memory
from draftscope.target.sweep import batches
from draftscope.target.wiring import Wiring

MANIFEST = "extract.json"
SCHEMA = "draftscope.extract/1"
SPARE_BYTES = 64 * 2**20
"""Left free on the disk."""


@dataclass(slots=True)
class Extracted:
    """What an extraction did.

    Attributes:
        written, kept: files made by this call, and found from an earlier one.
        tokens, answer_tokens, bytes: of all of them together.
        cropped: conversations cut at `max_length`.
        remade: unreadable files of an earlier call, made again.
        skipped: lines that gave nothing, and why.
    """

    folder: Path
    sequences: int = 0
    written: int = 0
    kept: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    bytes: int = 0
    cropped: int = 0
    remade: int = 0
    skipped: list[Unusable] = field(default_factory=list)

    def reasons(self) -> dict[str, int]:
        """Skipped lines by reason, most frequent first."""
        return dict(Counter(s.why for s in self.skipped).most_common())


def extract(
    target: Target, conversations: Iterable[Conversation | Unusable], folder: Path, *, wiring: Wiring | None = None,
    labels: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16, max_length: int = 2048, batch_tokens: int = 2048,
    keep_empty: bool = False, origin: str = "conversations", on_plan: Callable[[Extracted, int], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Extracted:
    """Write `hs_{i}.safetensors` for every conversation, i its index.

    Finished files of an earlier call with the same settings are kept. What is interrupted has lost the batch in hand.

    Args:
        wiring: what goes into the slots, None = the default boundaries.
        labels: names of the entries in the files, the last state's included; () = what they are.
        dtype: of the states in the files.
        max_length: longer conversations are cut there.
        batch_tokens: tokens of a forward pass, padding included.
        keep_empty: also write conversations without a single answer token.
        origin: where they come from, for messages.
        on_plan: called before anything runs, with the totals and the bytes still to write.
        on_tokens: called with the tokens of each batch written.

    Raises:
        DraftscopeError: nothing usable; no room; a folder written with other settings or from other conversations.
    """
    wiring = wiring or Wiring.of(default_boundaries(target.layers))
    target.check_taps(wiring.slots)
    done = Extracted(folder)
    chosen = list(usable(conversations, max_length, keep_empty, target.parts.embedding.shape[0], done))
    if not chosen:
        reasons = "; ".join(f"{why} ({count})" for why, count in list(done.reasons().items())[:3]) or "there are none"
        raise DraftscopeError(f"no conversation can be used: {reasons}", where=origin)
    entries = len(wiring.slots) + 1
    if labels and len(labels) != entries:
        raise UsageError(f"{len(labels)} labels for {entries} entries")
    metadata: dict[str, Any] = {"labels": list(labels)}
    if not labels:
        metadata = {"labels": [*(_label(b) for b in wiring.slots), "last"],
                    "layer_ids": [*(b.index for b in wiring.slots), target.layers]}
    _agree(folder, _settings(target, wiring, metadata, dtype, max_length))
    sweep_up(folder)
    shape = (entries, target.width)
    pending = [item for item in chosen if not _finished(folder, item, shape, dtype, done)]
    to_write = sum(_file_bytes(len(item.token_ids), shape, dtype) for item in pending)
    done.sequences, done.kept = len(chosen), len(chosen) - len(pending)
    done.tokens = sum(len(item.token_ids) for item in chosen)
    done.answer_tokens = sum(int(item.loss_mask.sum()) for item in chosen)
    done.bytes = sum(_file_bytes(len(item.token_ids), shape, dtype) for item in chosen)
    if on_plan is not None:
        on_plan(done, to_write)
    free = shutil.disk_usage(folder).free
    if to_write + SPARE_BYTES > free:
        raise DraftscopeError(f"needs {to_write / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free", where=str(folder),
                              remedy="Take fewer conversations, a smaller --max-length, or another disk")
    for group in _groups(pending, batch_tokens):
        names = tuple(metadata["labels"])
        for item, states in zip(group, states_of(target, group, wiring), strict=True):
            sample = Sample(_name(item.index), item.token_ids, states.to(dtype), item.loss_mask, names, item.index)
            write_sample(folder / _name(item.index), sample, metadata)
            done.written += 1
        if on_tokens is not None:
            on_tokens(sum(len(item.token_ids) for item in group))
    _conclude(folder, done)
    return done


def usable(
    conversations: Iterable[Conversation | Unusable], max_length: int, keep_empty: bool, vocab: int, done: Extracted,
) -> Iterator[Conversation]:
    for item in conversations:
        if isinstance(item, Unusable):
            done.skipped.append(item)
            continue
        if len(item.token_ids) == 0 or int(item.token_ids.min()) < 0 or int(item.token_ids.max()) >= vocab:
            done.skipped.append(Unusable(item.index, f"has token ids outside the target's vocabulary of {vocab}"))
            continue
        cut = len(item.token_ids) > max_length
        kept = Conversation(item.index, item.token_ids[:max_length].clone(), item.loss_mask[:max_length].clone()) if cut else item
        if not keep_empty and not bool(kept.loss_mask.any()):
            whole = bool(item.loss_mask.any())
            why = f"has no answer token among its first {max_length}" if whole else "its loss mask is empty: no answer token"
            done.skipped.append(Unusable(item.index, why))
            continue
        done.cropped += cut
        yield kept


def _groups(pending: list[Conversation], tokens: int) -> Iterator[list[Conversation]]:
    """Batches of like length, from a window of neighbours, so that files appear nearly in order."""
    for first in range(0, len(pending), 256):
        ordered = sorted(pending[first : first + 256], key=lambda item: len(item.token_ids))
        by_name = {str(item.index): item for item in ordered}
        for group in batches(((str(item.index), item.token_ids) for item in ordered), tokens):
            yield [by_name[name] for name, _ in group]


def states_of(target: Target, group: list[Conversation], wiring: Wiring) -> Iterator[Tensor]:
    """Slots, then the last state before the final norm: [T, L, Ht] of each conversation."""
    ids = torch.nn.utils.rnn.pad_sequence([item.token_ids.long() for item in group], batch_first=True)
    counts = torch.tensor([len(item.token_ids) for item in group])
    try:
        found = target.forward(ids, wiring.taps())
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise DraftscopeError(f"a batch of {len(ids)} conversations of up to {ids.shape[1]} tokens does not fit into memory",
                              where=f"line {group[-1].index + 1}",
                              remedy="Take a smaller --batch-tokens or --max-length") from None
    numbers = tuple(item.index for item in group)
    slots = wiring.apply(found.taps.cpu(), counts, requests=numbers, norm=target.parts.final_norm)
    states = torch.cat([slots, found.last.cpu()[:, :, None]], 2)
    return (states[row, : int(count)] for row, count in enumerate(counts))


def _name(index: int) -> str:
    return f"hs_{index}.safetensors"


def _label(boundary: Boundary) -> str:
    return f"boundary {boundary.index}" if boundary == Boundary(boundary.index) else str(boundary)


def _file_bytes(tokens: int, shape: tuple[int, int], dtype: torch.dtype) -> int:
    return tokens * (shape[0] * shape[1] * dtype.itemsize + 9) + 512


def _finished(folder: Path, item: Conversation, shape: tuple[int, int], dtype: torch.dtype, done: Extracted) -> bool:
    """Whether the file of a conversation is there and whole.

    Raises:
        DraftscopeError: it holds other tokens.
    """
    path = folder / _name(item.index)
    if not path.exists():
        return False
    try:
        file = TensorFile(path)
        token_ids, mask = file.tensor("token_ids"), file.tensor("loss_mask")
        states = file.floats("hidden_states", 3, "[T, L, H]")
    except DraftscopeError:
        done.remade += 1
        return False
    if not torch.equal(token_ids, item.token_ids.long()) or not torch.equal(mask.bool(), item.loss_mask):
        raise DraftscopeError(f"holds another conversation than line {item.index + 1}", where=str(path),
                              remedy="The input or the chat template has changed: extract into another folder")
    if states.shape[1:] != shape or states.dtype != dtype:
        raise DraftscopeError(f"holds states {list(states.shape)} of {states.dtype}", where=str(path),
                              remedy="It was not written with these settings: extract into another folder")
    return True


def _settings(target: Target, wiring: Wiring, metadata: dict[str, Any], dtype: torch.dtype, max_length: int) -> dict[str, Any]:
    return {
        "target": {"model_type": target.parts.model_type, "layers": target.layers, "width": target.width,
                   "fingerprint": target.parts.fingerprint(), "dtype": _dtype_name(target.dtype)},
        "slots": [str(b) for b in wiring.slots], "scale": list(wiring.scale), "shift": wiring.shift, "poison": wiring.poison,
        **({"less": [[slot, str(b)] for slot, b in wiring.less]} if wiring.less else {}),
        **({"spoilers": [repr(spoiler) for spoiler in wiring.spoilers]} if wiring.spoilers else {}),
        **metadata, "dtype": _dtype_name(dtype), "max_length": max_length,
    }


def _agree(folder: Path, settings: dict[str, Any]) -> None:
    """Hold the settings against those of an earlier call, or write them down."""
    path = folder / MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            if next(folder.glob("hs_*.safetensors"), None) is not None:
                raise DraftscopeError(f"holds data that was not extracted here (no {MANIFEST})", where=str(folder),
                                      remedy="Name a new folder")
            save_text(path, json.dumps({"schema": SCHEMA, "settings": settings}, indent=1) + "\n")
            return
        earlier = json.loads(path.read_text(encoding="utf-8"))["settings"]
    except OSError as error:
        raise DraftscopeError(error.strerror or "cannot be used", where=str(folder)) from None
    except (ValueError, KeyError, TypeError):
        raise DraftscopeError("is not the record of an extraction", where=str(path), remedy="Name a new folder") from None
    differing = sorted(key for key in settings.keys() | earlier.keys() if settings.get(key) != earlier.get(key))
    if differing:
        changes = "; ".join(f"{key} was {earlier.get(key)!r} and is now {settings.get(key)!r}" for key in differing)
        raise DraftscopeError(f"was begun with other settings: {changes}", where=str(folder),
                              remedy="Go on with the same settings, or extract into another folder")


def _conclude(folder: Path, done: Extracted) -> None:
    import transformers

    path = folder / MANIFEST
    record = json.loads(path.read_text(encoding="utf-8"))
    record["result"] = {
        "sequences": done.sequences, "tokens": done.tokens, "answer_tokens": done.answer_tokens, "cropped": done.cropped,
        "skipped": [{"line": s.index, "why": s.why} for s in done.skipped],
        "torch": torch.__version__, "transformers": transformers.__version__,
    }
    save_text(path, json.dumps(record, indent=1) + "\n")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
