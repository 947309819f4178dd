"""Files of SGLang's dumper (`DUMPER_ENABLE=1`): one tensor a file, its tags in its name.

`{dir}/{exp_name}/step=S___rank=R___dump_index=I___name=N___recompute_status=...[___layer_id=L].pt`, each a dict of `value` and
`meta` (`_dump_single` in `srt/debug_utils/dumper.py`, 0.5.23). A pass begins with `name=input_ids`; `positions`, `seq_lens` and
`rids` follow. Mode `all` adds every module's output as `non_intrusive__MODULE.output[.i]`, of which the second of an
`input_layernorm` is the residual stream. Without those the tensors that were dumped by hand with a `layer_id` are taken,
whatever they are. `sglang-dumper@2,15,27` names the layers to take as slots. Of several ranks the first is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
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

NAME = "sglang-dumper"
SUFFIX = ".pt"
KIND = "traces"
DEEP = True
EXPECTED = "`value` and `meta`"
STREAM = re.compile(r"non_intrusive__(?:.+\.)?layers\.(\d{1,5})\.input_layernorm\.output\.1")
EMBEDDED = re.compile(r"non_intrusive__(?:.+\.)?embed_tokens\.output")
LAST = re.compile(r"non_intrusive__(?:.+\.)?model\.norm\.output(\.1)?")


def tags_of(name: str) -> dict[str, str]:
    """The tags in a file's name (`_format_tags`)."""
    return dict(part.split("=", 1) for part in name.removesuffix(SUFFIX).split("___") if "=" in part)


def _is_dumped(name: str) -> bool:
    tags = tags_of(name)
    return "name" in tags and all(tags.get(key, "").isdecimal() and len(tags[key]) < 16 for key in ("step", "rank", "dump_index"))


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    if not _is_dumped(file.name):
        return None
    try:
        held = load_record(file, EXPECTED)
    except DraftscopeError:
        return None
    if "value" not in held or not isinstance(held.get("meta"), dict):
        return None
    return f"{file.name[:80]}: one tensor of SGLang's dumper, with its tags"


def open(path: Place, chosen: str | None = None, choice: str = "") -> FileSource[Trace]:
    """Requests of a folder of dumped tensors (or of several, one after the other).

    Args:
        choice: layers to take as slots, `2,15,27`; empty = all that are there.

    Raises:
        UsageError: a choice that names no layers.
        DraftscopeError: nothing there.
    """
    wanted = chosen_boundaries(choice, NAME)
    files, others = list_files(path, SUFFIX, deep=True)
    streams: dict[Place, list[Place]] = {}
    for file in files:
        if not _is_dumped(file.name):
            others.append(Skipped(str(file), "its name has no step, rank, dump_index and name"))
        elif int(tags_of(file.name)["rank"]) > 0 and not path.is_file():
            others.append(Skipped(str(file), "another rank"))
        else:
            streams.setdefault(path if path.is_file() else file.parent, []).append(file)
    for held in streams.values():
        held.sort(key=lambda file: int(tags_of(file.name)["dump_index"]))
    return FileSource(kind="traces", path=path, format=NAME, chosen=chosen,
                      files=sorted(streams, key=lambda one: natural(str(one))), others=others, meta={"engine": "sglang"},
                      read=lambda key, notes: read_traces(streams[key], notes, wanted, str(key)))


def read_traces(files: list[Place], notes: list[str], wanted: tuple[int, ...], where: str) -> list[Trace | Skipped]:
    """Requests put together from the dumped tensors of one rank, in the order of their numbers.

    Raises:
        DraftscopeError: a tensor that cannot be read, or no pass with states among them.
    """
    traces = stitch(_passes(files, notes, wanted), notes)
    if not traces:
        raise StatesError("holds no pass with token ids, positions and states", cause="layout", where=where,
                          remedy="Dump with DUMPER_NON_INTRUSIVE_MODE=all, or dump states by hand with a layer_id")
    for trace in traces:
        trace.meta = {"engine": "sglang", "format": NAME}
    return list(traces)


@dataclass(slots=True)
class _Pass:
    core: dict[str, Any] = field(default_factory=dict)
    streams: dict[int, Tensor] = field(default_factory=dict)
    by_hand: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    last: Tensor | None = None
    where: str = ""

    def __bool__(self) -> bool:
        return bool(self.streams or self.by_hand)

    def forward(self, wanted: tuple[int, ...], notes: list[str]) -> Forward | None:
        ids, positions = self.core.get("input_ids"), self.core.get("positions")
        streams = self.streams
        if len(streams) < 2 and self.by_hand:
            name = max(self.by_hand, key=lambda one: len(self.by_hand[one]))
            streams = self.by_hand[name]
            notes.append(f"no residual stream of input_layernorm: `{name}`, dumped by hand, is taken, layer ids as given")
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or not streams:
            return None
        rids = self.core.get("rids")
        lengths = self.core.get("seq_lens")
        count = len(lengths) if isinstance(lengths, Tensor) else None
        return forward_of(ids, positions, streams, wanted, self.where, last=self.last,
                          lengths=lengths if isinstance(lengths, Tensor) else None,
                          requests=[str(rid) for rid in rids] if isinstance(rids, list) and len(rids) == count else None)


def _passes(files: list[Place], notes: list[str], wanted: tuple[int, ...]) -> Iterator[Forward]:
    one, taken = _Pass(), 0
    for file in [*files, None]:
        tags = {} if file is None else tags_of(file.name)
        if one and (file is None or tags["name"] == "input_ids"):
            made = one.forward(wanted, notes)
            one = _Pass()
            if made is not None:
                taken += made.states.nbytes
                if taken > BUDGET:
                    notes.append(f"passes from {made.name} on are left out: {BUDGET >> 20} MiB of states are taken")
                    return
                yield made
        if file is not None:
            _add(one, file, tags)


def _add(one: _Pass, file: Place, tags: dict[str, str]) -> None:
    name = tags["name"]
    core = name in ("input_ids", "positions", "seq_lens", "rids")
    if not core and not (STREAM.fullmatch(name) or EMBEDDED.fullmatch(name) or LAST.fullmatch(name) or "layer_id" in tags):
        return
    value = load_record(file, EXPECTED).get("value")
    one.where = one.where or str(file)
    if isinstance(value, Tensor) and not owns_its_data(value):
        raise StatesError("declares more values than the file holds", where=f"{file}, value")
    if core:
        if not isinstance(value, Tensor) or (value.dim() == 1 and not value.dtype.is_floating_point):
            one.core[name] = value
        return
    if not isinstance(value, Tensor) or value.dim() != 2 or not is_floats(value.dtype):
        return
    if found := STREAM.fullmatch(name):
        one.streams[int(found.group(1))] = value
    elif EMBEDDED.fullmatch(name):
        one.streams.setdefault(0, value)
    elif found := LAST.fullmatch(name):
        one.last = value if found.group(1) or one.last is None else one.last
    elif not name.startswith("non_intrusive__") and tags["layer_id"].isdecimal() and len(tags["layer_id"]) < 6:
        one.by_hand.setdefault(name, {})[int(tags["layer_id"])] = value
