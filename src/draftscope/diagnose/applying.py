"""`diagnose --apply DIR`: a copy of the draft's checkpoint with the fixes in it, and the draft replayed again from the copy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftscope.consumers import ask, effective
from draftscope.diagnose.absorb import check_copy
from draftscope.diagnose.case import Inputs
from draftscope.diagnose.ladder import Ladder, Repair, combine
from draftscope.diagnose.verdict import Judged
from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.copying import whole_folder
from draftscope.eagle3.reading import Reading
from draftscope.eagle3.weightfiles import Weights, read_weights
from draftscope.errors import DraftscopeError, UsageError
from draftscope.faults.base import Undo
from draftscope.findings import Applied, Finding, Rung
from draftscope.states.places import model_folder
from draftscope.states.tensorfile import read_json, save_tensors

if TYPE_CHECKING:
    from draftscope.diagnose.run import Examination

_ALIASES = {"fc_norm": ("use_aux_norm",), "norm_output": ("return_hidden_post_norm",)}
_SPELT = {"fc_bias": "bias"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".index.json")
_NOT_HERE = "its fix is not in the checkpoint"


def check_apply(inputs: Inputs) -> None:
    """Refuse before any work what could not be written after it.

    Raises:
        UsageError: no draft to copy, a folder that holds something, or one of the inputs.
    """
    out = inputs.apply
    if out is None:
        return
    if inputs.draft is None:
        raise UsageError("--apply copies the draft's checkpoint", remedy="Give it with --draft")
    check_copy(out, inputs)


def apply(examination: Examination, judged: list[Judged], findings: list[Finding]) -> Applied:
    """Write the copy and measure it; nothing is written where no fix is in the checkpoint.

    Raises:
        DraftscopeError: the copy cannot be written, or cannot be opened as what it should be.
    """
    inputs = examination.case.inputs
    assert inputs.apply is not None
    assert inputs.draft is not None
    folder = model_folder(inputs.draft)
    work = _Work(folder, examination)
    done = [one for one, finding in zip(judged, findings, strict=True) if work.take(finding)]
    if not work.changes:
        return Applied(folder=None, left=work.left, says="nothing was written: " + (
            "no finding has a fix in the checkpoint" if findings else "there is nothing to mend"))
    copy = work.write(inputs.apply)
    before, after, rung = _measured(examination, copy, done)
    said = ""
    if before is not None and after is not None:
        figures = (("accept length", before.length, after.length), ("-log p", before.nll, after.nll))
        said = next((f"; {name} {was:.2f} before, {now:.2f} after" for name, was, now in figures
                     if was is not None and now is not None), "")
    return Applied(folder=str(inputs.apply), changes=work.changes, left=work.left, rung=rung, before=before, after=after,
                   says=f"{len(work.changes)} changes in a copy of the checkpoint{said}")


class _Work:
    """The copy while it is made."""

    def __init__(self, folder: Path, examination: Examination) -> None:
        self.folder, self.examination = folder, examination
        raw = read_json(folder / "config.json")
        self.raw: dict[str, Any] = raw if isinstance(raw, dict) else {}
        self.weights: Weights = read_weights(folder)
        self.tensors: dict[str, Tensor] = dict(self.weights.tensors)
        self.changes: list[str] = []
        self.left: list[str] = []
        self.wanted: dict[str, Any] = {}
        self.consumer = None if examination.m.consumer is None else ask(examination.m.consumer).known.id

    def take(self, finding: Finding) -> bool:
        """Make a finding's changes; whether there were any."""
        ahead = f"{finding.fault} ({', '.join(finding.where[:2])})"
        if finding.strength == "suspected":
            self.left.append(f"{ahead}: only suspected; nothing is changed for it")
            return False
        patch, keys = finding.fix.patch, finding.fix.config.get(self.consumer or "")
        before = len(self.changes)
        if patch is not None:
            for name, how in patch.tensors.items():
                self._tensor(ahead, name, how)
            for key, value in patch.config.items():
                self._set(key, value)
        if keys:
            settled = set() if patch is None else {key.partition(".")[0] for key in patch.config
                                                   if key not in DraftConfig.model_fields}
            self._merge(ahead, self.raw, {key: value for key, value in keys.items() if key not in settled})
        elif patch is None and finding.fix.config and "draftscope" not in finding.fix.config and finding.acceptance is not None:
            known = ", ".join(finding.fix.config)
            self.left.append(f"{ahead}: the keys depend on who reads the checkpoint: " + (
                f"name the consumer with --for ({known})" if self.consumer is None else
                f"there are none for {self.consumer} ({known})"))
            return False
        if len(self.changes) == before and not any(line.startswith(ahead) for line in self.left):
            self.left.append(f"{ahead}: {_NOT_HERE}: {finding.fix.says}")
        return len(self.changes) > before

    def write(self, out: Path) -> Checkpoint:
        """The copy under its own name, whole or not at all, read back."""
        with whole_folder(out) as (temporary, keep):
            spelt = self.weights.spelt
            save_tensors(temporary / "model.safetensors", {spelt.get(n, n): t for n, t in self.tensors.items()}, {"format": "pt"})
            (temporary / "config.json").write_text(json.dumps(self.raw, indent=2) + "\n", encoding="utf-8")
            for path in sorted(self.folder.iterdir()):
                if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHTS):
                    shutil.copyfile(path, temporary / path.name)
            made = load_checkpoint(temporary, target_layers=self.examination.case.layers)
            wrong = [f"{key} is {found!r}, not {value!r}" for key, value in self.wanted.items()
                     if (found := _read(made.config, key)) != value]
            if wrong:
                raise DraftscopeError(f"the copy does not say what it should: {'; '.join(wrong)}", where=str(out),
                                      remedy="Nothing was written; write the keys by hand")
            keep()
        return load_checkpoint(out, target_layers=self.examination.case.layers)

    # -- config.json -------------------------------------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        """A switch of the draft, or any other key, wherever the file has it; a dotted one where it has what that lies in."""
        if key.partition(".")[0] in DraftConfig.model_fields:
            self.wanted[key] = value
        layer = self.raw.get("transformer_layer_config")
        nested = self.raw.get("eagle_config")
        names = (_SPELT.get(key, key), *_ALIASES.get(key, ()))
        places = [held for held in (self.raw, nested, layer) if isinstance(held, dict)]
        *above, name = key.split(".")
        if above:
            self._set_below(places, above, name, value)
            return
        there = [(held, name) for held in places for name in names if name in held]
        if value is None:
            for held, name in there:
                del held[name]
                self.changes.append(f"config.json: {name} removed")
            return
        for held, name in there:
            held[name] = value
        if not there:
            held = layer if isinstance(layer, dict) and key in ("head_dim", "tie_word_embeddings", "rope_theta") else self.raw
            held[names[0]] = value
        self.changes.append(f"config.json: {names[0]} = {json.dumps(value)}")

    def _set_below(self, places: list[dict[str, Any]], above: list[str], name: str, value: Any) -> None:
        """A key within others; where these hold a set for each type of layer, in every set that has it."""
        for part in above:
            places = [held[part] for held in places if isinstance(held.get(part), dict)]
        sets = [one for held in places for one in held.values() if isinstance(one, dict) and name in one]
        for held in sets or places:
            if value is None:
                held.pop(name, None)
            else:
                held[name] = value
        if places:
            key = ".".join([*above, name])
            self.changes.append(f"config.json: {key} removed" if value is None else f"config.json: {key} = {json.dumps(value)}")

    def _merge(self, ahead: str, into: dict[str, Any], keys: Mapping[str, Any], prefix: str = "") -> None:
        """A consumer's own keys."""
        if "not_possible" in keys:
            self.left.append(f"{ahead}: {keys['not_possible']}")
            return
        for key, value in keys.items():
            if isinstance(value, dict) and isinstance(into.get(key, {}), dict):
                self._merge(ahead, into.setdefault(key, {}), value, f"{prefix}{key}.")
            elif into.get(key) != value:
                into[key] = value
                self.changes.append(f"config.json: {prefix}{key} = {json.dumps(value)}")

    # -- tensors -----------------------------------------------------------------------------------------------------------

    def _tensor(self, ahead: str, name: str, how: str) -> None:
        held = self.tensors
        verb, _, rest = how.partition(" ")
        if how == "from source":
            self._restore(ahead, name)
            return
        if how == "from t2d" and "t2d" not in held:
            self.left.append(f"{ahead}: there is no t2d to make the map from")
            return
        if how != "from t2d" and name not in held:
            self.left.append(f"{ahead}: tensor {name} is not in the files")
            return
        if how == "remove":
            del held[name]
        elif verb == "swap":
            other = rest.removeprefix("with ")
            held[name], held[other] = held[other], held[name]
        elif how == "transpose":
            held[name] = held[name].T.contiguous()
        elif verb == "subtract":
            held[name] = held[name] - int(rest)
        elif how == "from absolute ids":
            held[name] = held[name].long() - torch.arange(len(held[name]))
        else:
            ids = held["t2d"].bool().nonzero().squeeze(-1)
            held[name] = ids - torch.arange(len(ids))
        self.changes.append(f"tensor {name}: {how}")

    def _restore(self, ahead: str, name: str) -> None:
        source = self.examination.case.source
        if source is None:
            self.left.append(f"{ahead}: tensor {name} can be restored from the checkpoint that this one was made from: give it "
                             "with --source-draft")
            return
        tensor = source.tensors.get(name, source.idle.get(name))
        if tensor is None:
            self.left.append(f"{ahead}: the source draft has no tensor {name} either")
            return
        self.tensors[name] = tensor
        self.changes.append(f"tensor {name}: from source")


def _read(config: DraftConfig, key: str) -> Any:
    """What a draft's configuration says of a dotted key."""
    first, *below = key.split(".")
    found = getattr(config, first)
    for part in below:
        found = found.get(part)
    return found


def _measured(examination: Examination, copy: Checkpoint, done: list[Judged]) -> tuple[Rung | None, Rung | None, str | None]:
    """The draft replayed before and after on one rung: as the engine reads it on what it receives, else on training states."""
    case, m = examination.case, examination.m
    again = replace(case, checkpoint=copy)
    ladder = Ladder(again, examination.swept.get("serve"), m.reference)
    slots = copy.config.slots
    if copy.missing and set(copy.missing) - {"t2d", "lm_head.weight", "d2t"}:
        return None, None, None
    if case.serve is not None and m.shapes.get("serve") == slots:
        reading = _reading(examination, copy)
        after = ladder.served(combine((_of_states(one.suspicion.undo) for one in done), reading)).rung()
        return examination.rungs.get("as_read") or examination.rungs.get("served"), after, "as_read"
    if case.train is not None and m.shapes.get("train") == slots:
        return examination.rungs.get("trained"), ladder.trained(Repair()).rung(), "trained"
    return None, None, None


def _reading(examination: Examination, copy: Checkpoint) -> Reading:
    """How the engine reads the copy: as its consumer's facts have it, or with the faults that were seen in it."""
    m, case = examination.m, examination.case
    if case.checkpoint is not None and m.consumer is not None:
        told = effective(case.checkpoint, m.consumer, case.layers, m.model_type).reading
        if told != examination.as_read:
            return examination.as_read
    if m.consumer is not None:
        return effective(copy, m.consumer, case.layers, m.model_type).reading
    return examination.as_read


def _of_states(undo: Undo | None) -> Undo:
    """What a fix changes in the states that the draft receives: another place to capture, not another file."""
    if undo is None:
        return Undo()
    return Undo(reference=undo.reference, order=undo.order, states=undo.states)
