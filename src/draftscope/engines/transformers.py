"""Capture under transformers: an observer of `eagle3.generate` that writes what the draft received, or statistics of it.

Whatever goes wrong here ends the capture with a message, never the generation. A budget leaves out whole requests or a
request's tail, never its middle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.eagle3.generate import Rows
from draftscope.eagle3.generated import Generated
from draftscope.eagle3.tree import TreeShape
from draftscope.engines.served import Served
from draftscope.scan.served import NAME
from draftscope.states.capture import write_trace
from draftscope.states.leftover import sweep_up, temporary
from draftscope.states.tensorfile import save_tensors
from draftscope.states.types import Trace

_HEADER = 4096  # bytes kept free per file for its header and metadata


@dataclass(slots=True)
class Captured:
    """What a capture holds in the end.

    Attributes:
        requests, rows, bytes: written; bytes are those of the request files.
        requests_left_out: requests that the budget kept out whole.
        rows_cut: rows of request tails that it kept out; tails_cut: of how many requests.
        stopped: why the capture ended early, None if it did not.
    """

    requests: int = 0
    rows: int = 0
    bytes: int = 0
    requests_left_out: int = 0
    tails_cut: int = 0
    rows_cut: int = 0
    stopped: str | None = None


@dataclass(slots=True)
class _Recording:
    """One request as far as it has got: columns by name, one tensor per pass, and one per step."""

    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    steps: dict[str, list[Tensor]] = field(default_factory=dict)
    size: int = 0
    number_of_steps: int = 0
    cut: int = 0


class Capture:
    """Observer that writes a plain capture, one safetensors file per request, `capture.json` beside them.

    Args:
        folder: made if absent; must not hold a capture already.
        describe: goes to `capture.json` (see `description`).
        max_bytes: budget of all files together; None = no limit.
        max_requests: requests to record at most.
        last_hidden, fc_output, draft_states: record these too.
        statistics: keep sums of the rows in place of the rows, whatever `max_bytes` says; sample_rows: rows kept whole then.

    The result is in `captured`, also while it goes on; call `close` in the end.
    """

    def __init__(self, folder: Path, describe: dict[str, Any], *, max_bytes: int | None = None, max_requests: int | None = None,
                 last_hidden: bool = True, fc_output: bool = True, draft_states: bool = True, statistics: bool = False,
                 sample_rows: int = 256) -> None:
        self.folder, self.describe = folder, describe
        self.max_bytes, self.max_requests = max_bytes, max_requests
        self.captured = Captured()
        self._served = Served(len(describe.get("layer_ids") or ()) or None, sample_rows) if statistics else None
        self._optional = {"last_hidden": last_hidden, "fc_output": fc_output, "draft_states": draft_states}
        if statistics:
            self.max_bytes, self._optional = None, dict.fromkeys(self._optional, False)
        self._open: dict[int, _Recording] = {}
        self._begun = 0
        self._full = False  # a tail was cut: a new request would be cut shorter still
        self._spent = 0  # bytes written, and those of recordings in progress
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep_up(folder)
            if (folder / "capture.json").exists() or any(folder.glob("*.safetensors")):
                self._stop("it holds a capture already; choose another folder")
                return
            text = json.dumps(describe, indent=2) + "\n"
            self._spent = len(text.encode())
            part = temporary(folder / "capture.json")
            part.write_text(text)
            part.replace(folder / "capture.json")
        except OSError as error:
            self._stop(error.strerror or str(error))

    def prefill(self, request: int, rows: Rows) -> None:
        if self.captured.stopped is not None:
            return
        with self._guard():
            if self._full or (self.max_requests is not None and self._begun >= self.max_requests):
                self.captured.requests_left_out += 1
                return
            recording = _Recording()
            if self._add(recording, rows, {}, phase=0, accepted=len(rows.token_ids)):
                self._begun += 1
                self._open[request] = recording
            else:
                self.captured.requests_left_out += 1

    def step(self, request: int, rows: Rows, accepted: int, drafted: Tensor, states: Tensor) -> None:
        with self._guard():
            recording = self._open.get(request)
            if recording is None:
                return
            by_step = {"draft_token_ids": drafted[None], "accepted_counts": torch.tensor([accepted])}
            if rows.parents is not None:
                by_step["draft_parents"] = rows.parents[None]
            if self._optional["draft_states"]:
                by_step["draft_states"] = states[None]
            # Once a step did not fit, none after it may: the middle of a request must not be missing.
            if recording.cut or not self._add(recording, rows, by_step, phase=1, accepted=accepted + 1):
                recording.cut += len(rows.token_ids)
                self._full = True

    def done(self, generated: Generated) -> None:
        with self._guard():
            if generated.request in self._open:
                self._write(generated.request)

    def close(self) -> Captured:
        """End the capture; requests still in progress are written as far as they got."""
        for request in sorted(self._open):
            with self._guard():
                self._write(request)
        if self._served is not None and self._served.requests and self.captured.stopped is None:
            with self._guard():
                tensors, about = self._served.state()
                save_tensors(self.folder / NAME, tensors, about)
                self.captured.bytes = (self.folder / NAME).stat().st_size
        return self.captured

    def _add(self, recording: _Recording, rows: Rows, by_step: dict[str, Tensor], *, phase: int, accepted: int) -> bool:
        """Copy the rows of a pass, or say that the budget does not allow it."""
        count = len(rows.token_ids)
        index = torch.arange(count)
        by_row = {
            "fc_input": rows.fc_input.flatten(1), "token_ids": rows.token_ids,
            "accepted": index < accepted if rows.kept is None else rows.kept,
            "positions": rows.start + (index if rows.depths is None else rows.depths),
            "phase": torch.full((count,), phase, dtype=torch.uint8),
            "step": torch.full((count,), recording.number_of_steps if phase else -1), "verified_ids": rows.verified_ids,
        }
        if self._optional["last_hidden"]:
            by_row["last_hidden"] = rows.last
        if self._optional["fc_output"]:
            by_row["fc_output"] = rows.fc_output
        size = sum(tensor.nbytes for tensor in (*by_row.values(), *by_step.values())) + (0 if recording.size else _HEADER)
        if self.max_bytes is not None and self._spent + size > self.max_bytes:
            return False
        for store, columns in ((recording.rows, by_row), (recording.steps, by_step)):
            for name, tensor in columns.items():
                store.setdefault(name, []).append(tensor.detach().to("cpu", copy=True))
        self._spent += size
        recording.size += size
        recording.number_of_steps += phase
        return True

    def _write(self, request: int) -> None:
        recording = self._open.pop(request)
        path = self.folder / f"request_{request}.safetensors"
        columns: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in recording.rows.items()}
        columns |= {name: _stacked(tensors) for name, tensors in recording.steps.items()}
        if self._served is not None:
            kept = columns["accepted"]
            self._served.take(request, columns["fc_input"][kept], columns["positions"][kept].tolist(),
                              columns["phase"][kept].tolist())
            self._served.ended(request)
            self._count(recording, len(columns["token_ids"]), 0)
            return
        write_trace(path, Trace(name=path.name, **columns))
        size = path.stat().st_size
        self._spent += size - recording.size
        self._count(recording, len(columns["token_ids"]), size)

    def _count(self, recording: _Recording, rows: int, size: int) -> None:
        self.captured.requests += 1
        self.captured.rows += rows
        self.captured.bytes += size
        self.captured.tails_cut += recording.cut > 0
        self.captured.rows_cut += recording.cut

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Any failure stops the capture: the generation must not notice."""
        try:
            yield
        except Exception as error:
            self._stop(str(error) or type(error).__name__)

    def _stop(self, why: str) -> None:
        self.captured.stopped = why if str(self.folder) in why else f"{self.folder}: {why}"
        self._open.clear()


def _stacked(tensors: list[Tensor]) -> Tensor:
    """One tensor for all steps; a tree with fewer nodes than others is padded with -1, or with zeros where it has states."""
    if tensors[0].dim() == 1:
        return torch.cat(tensors)
    widest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([
        torch.cat([t, t.new_full((1, widest - t.shape[1], *t.shape[2:]), 0 if t.is_floating_point() else -1)], 1) for t in tensors
    ])


def description(*, model: str, draft: str, layer_ids: list[int] | None, k: int, tree: TreeShape | None = None) -> dict[str, Any]:
    """What `capture.json` says of a capture under transformers. `layer_ids` are boundaries, as the draft's config names them.

    `num_spec_tokens` is K of the step tensors: the chain's length, or a tree's drafted nodes.
    """
    import transformers

    shape: dict[str, Any] = {"num_spec_tokens": k, "topk": 1} if tree is None else {
        "num_spec_tokens": tree.drafted, "topk": tree.topk, "num_steps": tree.steps, "num_draft_tokens": tree.nodes,
    }
    return {
        "engine": "transformers", "engine_version": transformers.__version__, "model": model, "draft": draft,
        "layer_ids": layer_ids, **shape, "temperature": 0.0,
    }
