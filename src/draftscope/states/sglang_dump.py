"""SGLang's tensor dump (`--debug-tensor-dump-output-folder`): what every module put out, one file a forward pass.

Under speculation there is a `target/` and a `draft/`, in each a folder `TP{t}_PP{p}_Rank{r}_pid{pid}` with `Pass{n:05d}.pt`, a
dict by module name (`srt/debug_utils/tensor_dump_forward_hook.py`, 0.5.23). An `input_layernorm` that adds the branch to the
residual puts out both, [normed, residual], and the residual of layer b is boundary b; `model.norm` gives the last state in the
same way. A pass's file is written before the output of the top module is added, which therefore stands in the next one. Hooks
record outputs, so what the draft's `fc` received is not there: the target's boundaries are taken, all of them or those named as
`sglang-dump@2,15,27`. Of several tensor-parallel ranks the first is read; pipeline ranks are put together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.dtypes import is_floats
from draftscope.states.errors import StatesError
from draftscope.states.folder import FileSource, list_files, natural
from draftscope.states.passes import BUDGET, Forward, chosen_boundaries, forward_of, stitch
from draftscope.states.places import Place
from draftscope.states.torchfile import load_record, owns_its_data
from draftscope.states.types import Skipped, Trace

NAME = "sglang-dump"
SUFFIX = ".pt"
KIND = "traces"
DEEP = True
RANK = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid(\d+)")
PASS = re.compile(r"Pass(\d+)\.pt")
NORM = re.compile(r"(?:.+\.)?layers\.(\d+)\.input_layernorm")
EXPECTED = "outputs by module name"
IDS, POSITIONS, LENGTHS = (f".forward_batch_info.{name}" for name in ("input_ids", "positions", "seq_lens"))


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    try:
        held = load_record(file, EXPECTED)
    except DraftscopeError:
        return None
    streams, _ = streams_of(held)
    if _ending(held, IDS) is None or not streams:
        return None
    return (f"{file.name}: outputs of {len(held)} modules in one forward pass, the residual stream at {len(streams)} boundaries "
            "among them")


def streams_of(held: dict[str, Any]) -> tuple[dict[int, Tensor], Tensor | None]:
    """Residual streams by boundary, and the last state before the final norm (after it where only that was recorded)."""
    streams: dict[int, Tensor] = {}
    last: Tensor | None = None
    for name, value in held.items():
        found = NORM.fullmatch(str(name))
        if found and (stream := _second(value)) is not None and len(found.group(1)) < 6:
            streams[int(found.group(1))] = stream
        elif str(name).endswith("embed_tokens") and _is_state(value):
            streams.setdefault(0, value)
        elif str(name) == "norm" or str(name).endswith("model.norm"):
            last = _second(value) if not _is_state(value) else value
    return streams, last


def open(path: Place, chosen: str | None = None, choice: str = "") -> FileSource[Trace]:
    """Requests of a dump: of its folder, of one rank's, or of one pass.

    Args:
        choice: boundaries to take as slots, `2,15,27`; empty = all that are there.

    Raises:
        UsageError: a choice that names no boundaries.
        DraftscopeError: nothing there.
    """
    wanted = chosen_boundaries(choice, NAME)
    files, others = list_files(path, SUFFIX, deep=True)
    groups: dict[Place, list[Place]] = {}
    for file in files:
        if path.is_file() or PASS.fullmatch(file.name):
            groups.setdefault(file.parent, []).append(file)
        else:
            others.append(Skipped(str(file), "no Pass{n}.pt of a tensor dump"))
    streams: dict[Place, list[list[Place]]] = {}
    for folder in sorted(groups, key=lambda one: natural(str(one))):
        rank = RANK.fullmatch(folder.name)
        if folder.parent.name == "draft" and not path.is_file() and folder != path:
            others.append(Skipped(str(folder), "the draft's own passes, whose input is not recorded"))
        elif rank is not None and int(rank.group(1)) > 0 and folder != path and not path.is_file():
            others.append(Skipped(str(folder), "another tensor-parallel rank: the residual stream is the same on all"))
        elif rank is not None and int(rank.group(2)) > 0 and streams and folder != path:
            next(reversed(streams.values())).append(groups[folder])
        else:
            streams[path if path.is_file() else folder] = [groups[folder]]
    said = chosen and f"{chosen}; " + ("all of them are taken as slots, name some with " + f"{NAME}@2,15,27" if not wanted
                                       else f"boundaries {choice} are taken as slots")
    return FileSource(kind="traces", path=path, format=NAME, chosen=said, files=list(streams), others=others,
                      meta={"engine": "sglang", **({"layer_ids": list(wanted)} if wanted else {})},
                      read=lambda key, notes: read_traces(streams[key], notes, wanted))


def read_traces(ranks: list[list[Place]], notes: list[str], wanted: tuple[int, ...] = ()) -> list[Trace | Skipped]:
    """Requests put together from the passes of one process (or one pipeline).

    Raises:
        DraftscopeError: a pass that cannot be read, named.
    """
    traces = stitch(_passes(ranks, notes, wanted), notes)
    for trace in traces:
        trace.meta = {"engine": "sglang", "format": NAME}
        if wanted:
            trace.meta["layer_ids"] = list(wanted)
    return list(traces)


def _passes(ranks: list[list[Place]], notes: list[str], wanted: tuple[int, ...]) -> Iterator[Forward]:
    taken = 0
    for number, file in enumerate(ranks[0]):
        held = load_record(file, EXPECTED)
        for other in ranks[1:]:
            if number < len(other):
                held = {**load_record(other[number], EXPECTED), **held}
        ids, positions, lengths = (_ending(held, name) for name in (IDS, POSITIONS, LENGTHS))
        if ids is None or positions is None:
            raise StatesError("has no forward_batch_info.input_ids and .positions", where=str(file),
                              remedy="TENSOR_DUMP_TOP_LEVEL_MODULE_NAME must name the top module when SGLang dumps")
        streams, last = streams_of(held)
        if last is not None and _is_state(held.get("model.norm")):
            notes.append("the final norm put out no residual: the last state is the one after that norm")
        one = forward_of(ids, positions, streams, wanted, str(file), last=last, lengths=lengths)
        taken += one.states.nbytes
        if taken > BUDGET:
            notes.append(f"passes from {file.name} on are left out after {BUDGET >> 20} MiB of states (name boundaries for more)")
            return
        yield one


def _ending(held: dict[str, Any], name: str) -> Tensor | None:
    return next((value for key, value in held.items() if str(key).endswith(name) and isinstance(value, Tensor)
                 and value.dim() == 1 and not value.dtype.is_floating_point and owns_its_data(value)), None)


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and is_floats(value.dtype) and owns_its_data(value)


def _second(value: Any) -> Tensor | None:
    """The residual of [normed, residual]."""
    two = isinstance(value, list | tuple) and len(value) == 2 and all(_is_state(one) for one in value)
    return value[1] if two and value[0].shape == value[1].shape else None
