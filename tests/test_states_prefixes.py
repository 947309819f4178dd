"""Prefixes that a server had cached, taken from the other requests of a capture."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from draftscope.states import capture as plain_capture
from draftscope.states.capture import write_trace
from draftscope.states.types import Trace, from_trace


def whole(name: str, ids: list[int], prompt: int, seed: int) -> Trace:
    """A request of plain decoding; its states depend on token and position alone, as a causal model's do on one text."""
    tokens, positions = torch.tensor(ids), torch.arange(len(ids))
    states = torch.stack([torch.sin(tokens * (i + 1) + positions * 0.1) for i in range(6)], 1)
    return Trace(name=name, fc_input=states, token_ids=tokens, accepted=torch.ones(len(ids), dtype=torch.bool),
                 phase=(positions >= prompt).to(torch.uint8), step=torch.full((len(ids),), -1), positions=positions,
                 verified_ids=torch.full((len(ids),), -1), fc_output=states[:, :2] + seed, draft_input_ids=tokens.roll(-1))


def served(trace: Trace, cached: int) -> Trace:
    """The same request as a server with its first tokens in the cache would have it recorded."""
    rows = len(trace.token_ids)
    held = {f.name: getattr(trace, f.name) for f in fields(trace)}
    cut = {name: value[cached:] for name, value in held.items() if isinstance(value, Tensor) and len(value) == rows}
    return replace(trace, **cut, prefix_token_ids=trace.token_ids[:cached])


def read(folder: Path) -> tuple[dict[str, Trace], list[str]]:
    source = plain_capture.open(folder)
    found = {trace.name: trace for trace in source}
    return found, source.notes


def test_prefixes_come_from_other_requests(tmp_path: Path) -> None:
    shared = list(range(1, 21))
    first = whole("a.safetensors", [*shared[:12], 40, 41, 42], 12, 0)
    second = whole("b.safetensors", [*shared, 50, 51], 20, 0)
    third = whole("c.safetensors", [*shared, 50, 60, 61, 62], 22, 0)
    write_trace(tmp_path / "a.safetensors", first)
    write_trace(tmp_path / "b.safetensors", served(second, 8))  # of a
    write_trace(tmp_path / "c.safetensors", served(third, 16))  # of b, and through it of a
    found, notes = read(tmp_path)
    for trace in (first, second, third):
        sequence, expected = from_trace(found[trace.name], 3), from_trace(trace, 3)
        for name in ("token_ids", "features", "positions", "answer", "fc_output"):
            assert torch.equal(getattr(sequence, name), getattr(expected, name)), name
    assert found["c.safetensors"].meta["prefix_from"] == "b.safetensors"
    assert sum("cached by the server" in note for note in notes) == 2


def test_a_prefix_that_nobody_has_is_missed_aloud(tmp_path: Path) -> None:
    trace = whole("a.safetensors", list(range(12)), 10, 0)
    write_trace(tmp_path / "a.safetensors", served(trace, 8))
    write_trace(tmp_path / "b.safetensors", whole("b.safetensors", [*range(7), 30, 31], 7, 0))  # one token short
    found, notes = read(tmp_path)
    assert len(found["a.safetensors"].token_ids) == 4
    assert found["a.safetensors"].positions is not None and int(found["a.safetensors"].positions[0]) == 8
    assert [note for note in notes if "in no other file" in note]


def test_a_column_that_one_of_the_two_lacks_is_left_out(tmp_path: Path) -> None:
    first = whole("a.safetensors", list(range(12)), 10, 0)
    first.fc_output = None
    write_trace(tmp_path / "a.safetensors", first)
    write_trace(tmp_path / "b.safetensors", served(whole("b.safetensors", list(range(12)), 10, 0), 8))
    found, _ = read(tmp_path)
    assert found["b.safetensors"].fc_output is None
    assert len(found["b.safetensors"].token_ids) == 12
