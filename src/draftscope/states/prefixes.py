"""Rows that a server's prefix cache kept from a capture, taken from another request of the same capture.

A request whose beginning was cached has no states of it in its own file (`prefix_token_ids` says which tokens it was), but the
request that was served them first has. vLLM reuses the draft's keys and values too, so these rows are what its draft saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.dtypes import common
from draftscope.states.places import Place
from draftscope.states.types import Trace

OPTIONAL = ("last_hidden", "fc_output", "verified_ids", "draft_input_ids", "positions")


@dataclass(slots=True)
class _Known:
    """Tokens of a file from position 0 on, [T] int64, the first `missing` of them without rows."""

    missing: int
    token_ids: Tensor


class Prefixes:
    """Finds and prepends missing prefixes. Files are read as they are needed, their token ids once.

    Args:
        files: of the capture.
        read: one file as it is.
    """

    def __init__(self, files: list[Place], read: Callable[[Place], Trace]) -> None:
        self._files, self._read = files, read
        self._known: dict[Place, _Known | None] = {}

    def complete(self, trace: Trace, notes: list[str]) -> Trace:
        """The trace with its prefix; as it is, with a note, where no other file has it."""
        if trace.prefix_token_ids is None or not len(trace.prefix_token_ids):
            return trace
        rows = len(trace.prefix_token_ids)
        donor = self._donor(trace.prefix_token_ids, trace.fc_input.shape[1])
        if donor is None:
            notes.append(f"{trace.name}: its first {rows} rows were in the server's prefix cache and are in no other file, so a "
                         "replay of it lacks them (serve with prefix caching off)")
            return trace
        notes.append(f"{trace.name}: its first {rows} rows, cached by the server, are those of {donor.name}")
        return _prepended(trace, donor, rows)

    def _donor(self, wanted: Tensor, width: int) -> Trace | None:
        """Another file's trace that has rows of this width for all these tokens, from position 0 on."""
        rows = len(wanted)
        for file in self._files:
            known = self._of(file)
            if known is None or known.missing >= rows or len(known.token_ids) < rows:
                continue
            if torch.equal(known.token_ids[:rows], wanted):
                trace = self._read(file)
                if trace.fc_input.shape[1] != width:
                    continue
                if not known.missing:
                    return trace
                # It was itself given a part, a shorter one.
                first = self._donor(known.token_ids[: known.missing], width)
                if first is not None:
                    return _prepended(trace, first, known.missing)
        return None

    def _of(self, file: Place) -> _Known | None:
        if file not in self._known:
            try:
                trace = self._read(file)
            except DraftscopeError:
                self._known[file] = None
                return None
            prefix = trace.prefix_token_ids if trace.prefix_token_ids is not None else torch.zeros(0, dtype=torch.int64)
            self._known[file] = _Known(len(prefix), torch.cat([prefix, trace.token_ids[trace.accepted]]))
        return self._known[file]


def _prepended(trace: Trace, donor: Trace, rows: int) -> Trace:
    kept = donor.accepted.nonzero().squeeze(-1)[:rows]
    whole = Trace(
        name=trace.name, fc_input=_joined(donor.fc_input[kept], trace.fc_input),
        token_ids=torch.cat([donor.token_ids[kept], trace.token_ids]),
        accepted=torch.cat([torch.ones(rows, dtype=torch.bool), trace.accepted]),
        phase=None if trace.phase is None else torch.cat([torch.zeros(rows, dtype=torch.uint8), trace.phase]),
        step=None if trace.step is None else torch.cat([torch.full((rows,), -1), trace.step]),
        draft_token_ids=trace.draft_token_ids, draft_parents=trace.draft_parents, accepted_counts=trace.accepted_counts,
        draft_states=trace.draft_states, meta={**trace.meta, "prefix_from": donor.name},
    )
    for name in OPTIONAL:
        theirs, own = getattr(donor, name), getattr(trace, name)
        if theirs is not None and own is not None and theirs.shape[1:] == own.shape[1:]:
            setattr(whole, name, _joined(theirs[kept], own))
    if whole.verified_ids is not None:
        whole.verified_ids[:rows] = -1
    return whole


def _joined(first: Tensor, then: Tensor) -> Tensor:
    dtype = common([first.dtype, then.dtype])
    return torch.cat([first.to(dtype), then.to(dtype)])
