"""SGLang's answers to `return_hidden_states`: JSON with `meta_info.hidden_states`, one response an object or a line.

The list holds one list of rows for each piece of the prompt, then one row for each answer token but the last
(`_append_prefill_hidden_states` and `_append_decode_hidden_states` in
`srt/managers/scheduler_components/batch_result_processor.py`, 0.5.23). A row is the slots behind each other where the server
captures them for its draft, else the state after the final norm. A cached prefix (`meta_info.cached_tokens`) has no rows. The
answer's ids are `output_ids`; those of the prompt are not sent back: they are looked for in `input_ids` beside the response
(put them there, or keep request and response in one object), or in `meta_info.input_token_logprobs`. Values come as decimal
text and are read as float32.
"""

from __future__ import annotations

import json
import mmap
import re
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.folder import FileSource, list_files
from draftscope.states.places import Place, local_copy
from draftscope.states.types import Skipped, Trace

NAME = "sglang-response"
SUFFIX = (".json", ".jsonl")
KIND = "traces"
DEEP = False
REST = 64 * 2**20
"""What a response may hold besides its states."""
START = re.compile(rb'"hidden_states"\s*:\s*\[')
ROW = re.compile(rb"[\[\]]")
REMEDY = "Put the request's `input_ids` beside the response"


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    try:
        first = next(iter(_responses(file)), None)
    except DraftscopeError:
        return None
    if first is None or not isinstance(first[0], dict) or not first[1]:
        return None
    shape = [list(part.shape) for part in first[1]]
    return f"{file.name}: JSON with `hidden_states` of {len(shape)} pieces {shape[:3]} beside `meta_info`"


def open(path: Place, chosen: str | None = None) -> FileSource[Trace]:
    """Responses of a folder or of one file, lazily by file.

    Raises:
        DraftscopeError: nothing there.
    """
    files, others = list_files(path, SUFFIX)
    return FileSource(kind="traces", path=path, format=NAME, chosen=chosen, files=files, others=others, meta={"engine": "sglang"},
                      read=read_traces)


def read_traces(file: Place, notes: list[str]) -> list[Trace | Skipped]:
    """The responses of a file; those that do not fit are handed back as skipped.

    Raises:
        DraftscopeError: no JSON, or no response with states in it.
    """
    notes.append("states come as decimal text: read as float32")
    items: list[Trace | Skipped] = []
    for row, (response, pieces) in enumerate(_responses(file)):
        where = f"{file}, row {row}"
        try:
            items.append(_trace(response, pieces, where, f"{file.name}[{row}]", notes))
        except StatesError as error:
            items.append(Skipped(str(file), f"{error.what}. {error.remedy}".rstrip(". "), row, error.cause))
    if not items:
        raise StatesError("holds no `hidden_states`", cause="foreign", where=str(file))
    return items


def _trace(response: Any, pieces: list[Tensor], where: str, name: str, notes: list[str]) -> Trace:
    meta = response.get("meta_info") if isinstance(response, dict) else None
    if not isinstance(meta, dict) or not pieces:
        raise StatesError("has no `meta_info` with `hidden_states`", where=where)
    widths = {piece.shape[-1] for piece in pieces}
    if len(widths) > 1:
        raise StatesError(f"has rows of unlike widths: {sorted(widths)[:6]}", where=where)
    states = torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])
    prompt, answer = _prompt(response, meta), _ids(response.get("output_ids"))
    if answer is None:
        answer = _logprob_ids(meta.get("output_token_logprobs"))
    if prompt is None or answer is None:
        raise StatesError(f"does not say the {'prompt' if prompt is None else 'answer'}'s token ids", where=where,
                          remedy=REMEDY if prompt is None else "Ask for output_ids")
    cached = meta.get("cached_tokens", 0)
    cached = cached if isinstance(cached, int) and 0 < cached < len(prompt) else 0
    tokens = torch.tensor([*prompt, *answer[:-1]], dtype=torch.int64)[cached:]
    if cached:
        notes.append("the first tokens of some prompts came from the prefix cache and have no rows")
    if len(states) != len(tokens):
        raise StatesError(f"has {len(states)} rows for {len(prompt)} prompt tokens ({cached} cached) and {len(answer)} answered",
                          cause="rows", where=where, remedy="A row belongs to every token but the last; turn the cache off")
    rows = len(states)
    phase = torch.zeros(rows, dtype=torch.uint8)
    phase[len(prompt) - cached :] = 1
    kept = {key: meta[key] for key in ("id", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version")
            if isinstance(meta.get(key), str | int)}
    verified = torch.tensor([*prompt[1:], *answer], dtype=torch.int64)[cached:]
    return Trace(name=name, fc_input=states, token_ids=tokens, accepted=torch.ones(rows, dtype=torch.bool), phase=phase,
                 positions=torch.arange(cached, cached + rows), verified_ids=verified,
                 meta={"engine": "sglang", "format": NAME, **kept})


def _prompt(response: dict[str, Any], meta: dict[str, Any]) -> list[int] | None:
    for holder in (response, response.get("request"), meta):
        if isinstance(holder, dict):
            for key in ("input_ids", "prompt_token_ids"):
                if (found := _ids(holder.get(key))) is not None:
                    return found
    return _logprob_ids(meta.get("input_token_logprobs"))


def _ids(value: Any) -> list[int] | None:
    good = isinstance(value, list) and value and all(type(i) is int and abs(i) < 2**62 for i in value)
    return value if good else None


def _logprob_ids(value: Any) -> list[int] | None:
    """Ids of [logprob, id, text] triples."""
    if not isinstance(value, list) or not all(isinstance(one, list) and len(one) >= 2 for one in value):
        return None
    return _ids([one[1] for one in value])


def _responses(file: Place) -> Iterator[tuple[Any, list[Tensor]]]:
    """Each response without its states, and the states' pieces [rows, width] or [width].

    The states are read out of the text row by row; only the rest is parsed as JSON.
    """
    if not file.is_file():
        raise StatesError("is not a file" if file.exists() else "does not exist", cause="broken", where=str(file))
    try:
        with local_copy(file) as copied, copied.open("rb") as source:
            start = source.read(64).lstrip()[:1]
            if start not in (b"{", b"["):
                raise StatesError("is no JSON object or list" if start else "is empty", cause="broken", where=str(file))
            with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as text:
                yield from _split(text, file)
    except OSError as error:
        raise StatesError(f"cannot be read ({error.strerror})", cause="broken", where=str(file)) from None


def _split(text: mmap.mmap, file: Place) -> Iterator[tuple[Any, list[Tensor]]]:
    rest = bytearray()
    found: list[list[Tensor]] = []
    at = 0
    while (start := START.search(text, at)) is not None:
        rest += text[at : start.start()]
        pieces, at = _pieces(text, start.end(), file)
        rest += b'"hidden_states":%d' % len(found)
        found.append(pieces)
        _bounded(rest, file)
    if len(text) - at > REST:
        raise StatesError(f"holds more than {REST >> 20} MiB besides states", cause="foreign", where=str(file))
    rest += text[at:]
    _bounded(rest, file)
    lines = rest.splitlines() if file.name.endswith(".jsonl") else [rest]
    for line in lines:
        if line.strip():
            try:
                held = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise StatesError(f"is no JSON ({str(error)[:120]})", cause="broken", where=str(file)) from None
            for response in held if isinstance(held, list) else [held]:
                yield response, _own(response, found)


def _bounded(rest: bytearray, file: Place) -> None:
    if len(rest) > REST:
        raise StatesError(f"holds more than {REST >> 20} MiB besides states", cause="foreign", where=str(file))


def _own(response: Any, found: list[list[Tensor]]) -> list[Tensor]:
    meta = response.get("meta_info") if isinstance(response, dict) else None
    number = meta.get("hidden_states") if isinstance(meta, dict) else None
    return found[number] if isinstance(number, int) and 0 <= number < len(found) else []


def _pieces(text: mmap.mmap, at: int, file: Place) -> tuple[list[Tensor], int]:
    """Pieces of the list that begins before `at`, and where it ends."""
    pieces: list[Tensor] = []
    rows: list[np.ndarray[Any, Any]] = []
    depth, start, opened = 1, at, False
    for bracket in ROW.finditer(text, at):
        here = bracket.start()
        if text[here] == ord("["):
            depth, start = depth + 1, here + 1
            if depth > 3:
                break
            if depth == 2 and rows:
                pieces.append(_stack(rows, file))
                rows = []
            opened = True
            continue
        depth -= 1
        if depth >= 1 and opened:
            rows.append(_row(text[start:here], file))
        opened = False
        if depth == 1:
            pieces.append(_stack(rows, file))
            rows = []
        elif depth == 0:
            return pieces, here + 1
    raise StatesError("its `hidden_states` end in the middle, or are nested too deeply", cause="broken", where=str(file),
                      remedy="Write the response again")


def _row(text: bytes, file: Place) -> np.ndarray[Any, Any]:
    if b"null" in text or b"N" in text or b"I" in text:
        text = text.replace(b"null", b"nan")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            values = np.fromstring(text.decode("ascii"), dtype=np.float32, sep=",")
    except (ValueError, DeprecationWarning, RuntimeWarning, UnicodeDecodeError):
        values = np.empty(0, dtype=np.float32)
    if not len(values):
        shown = text[:40].decode("ascii", "replace")
        raise StatesError(f"its `hidden_states` hold a row that is no list of numbers ({shown}...)", cause="broken",
                          where=str(file))
    return values


def _stack(rows: list[np.ndarray[Any, Any]], file: Place) -> Tensor:
    if not rows or len({len(row) for row in rows}) > 1:
        widths = sorted({len(row) for row in rows})[:6]
        what = f"rows of unlike widths: {widths}" if rows else "an empty piece"
        raise StatesError(f"its `hidden_states` have {what}", cause="rows", where=str(file))
    return torch.from_numpy(np.stack(rows))
