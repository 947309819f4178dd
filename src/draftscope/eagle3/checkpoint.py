"""Draft checkpoints: opened in either dialect, checked, turned into a `Draft`, and saved.

Tensor names in memory are the native dialect's (`fc`, `midlayer.*`, `norm`, `lm_head`). A missing tensor is no error, since
engines don't refuse it either: it stays at its initial value there, and here.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor

from draftscope.eagle3.altered import altered
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.dialects import Writer, describe, invalid
from draftscope.eagle3.model import Draft
from draftscope.eagle3.reading import D2T, Reading
from draftscope.eagle3.weightfiles import read_weights
from draftscope.eagle3.writing import native_config
from draftscope.errors import DraftscopeError
from draftscope.states.leftover import save_text
from draftscope.states.places import Place, model_folder
from draftscope.states.tensorfile import read_json, save_tensors

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

WHOLE = 6
"""Decoder layers from which weights without an `fc` are a whole model's."""
# What a tensor that is missing may come to in memory, against what the files hold.
_SPARE, _TIMES = 2**22, 64


class NoDraft(DraftscopeError):
    """Weights that are of something else than an EAGLE-3 draft."""


@dataclass(slots=True)
class Checkpoint:
    """A draft checkpoint as found. Tensors are mapped from the files where these allow it.

    Attributes:
        raw: config.json as it is.
        tensors: under native names, in the dtypes stored; `d2t` [D] is an offset map, `t2d` [V] a mask.
        missing: tensors that the configuration asks for and the files lack.
        unexpected: names in the files that the configuration has no use for, as spelt there.
        layer_ids, layer_ids_key: the file's own layer ids and the key that held them (`config.boundaries` translates them).
        notes: what was renamed or stripped on the way, and readings that were chosen.
        spelt: native name of every tensor to its name in the files.
        idle: the unexpected tensors, by native name.
        files: names of the weight files.
    """

    folder: Path
    config: DraftConfig
    raw: dict[str, Any]
    tensors: dict[str, Tensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    layer_ids: tuple[int, ...] | None = None
    layer_ids_key: str = ""
    notes: tuple[str, ...] = ()
    spelt: dict[str, str] = field(default_factory=dict)
    idle: dict[str, Tensor] = field(default_factory=dict)
    files: tuple[str, ...] = ()


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that a configuration asks for, under native names."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in Draft(config).named_parameters()}
    if not config.norm_before_head and not config.norm_output:
        del shapes["norm.weight"]
    return shapes


def load_checkpoint(folder: Place | str, *, target_layers: int | None = None, writer: Writer | None = None) -> Checkpoint:
    """Open a draft checkpoint.

    Args:
        folder: holds config.json and weights (`weightfiles`); of a URL these are copied.
        target_layers: decoder layers of the target; without it a configuration that names no layer ids has no boundaries.
        writer: whose trainer wrote it, where that changes what a key means; None = by the names of the tensors.

    Raises:
        NoDraft: weights of something else.
        DraftscopeError: another file format, a truncated file, a shape that contradicts the configuration, or
            something that the draft model here can't honour.
    """
    folder = model_folder(folder)
    raw = _read_config(folder / "config.json")
    weights = read_weights(folder)
    tensors, spelt = weights.tensors, weights.spelt
    notes = [*weights.notes, *(f"prefix {p} stripped from tensor names" for p in weights.prefixes)]
    if not any(name.startswith(("fc.", "midlayer.", "lm_head.")) for name in tensors):
        raise NoDraft("no tensor of an EAGLE-3 draft (fc, midlayer or layers.0, lm_head) in the files", where=str(folder))
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) >= WHOLE and "fc.weight" not in tensors:
        raise NoDraft("holds a whole model (no fc, and decoder layers one after the other), no EAGLE-3 draft",
                      where=str(folder), remedy="Name the draft's folder here, and the target's with --target")
    if writer is None and "draft_model." in weights.prefixes:
        writer = "specforge"
        if "norm_output" in raw:
            notes.append("tensors named draft_model.*: norm_output is read as SpecForge means it")
    norm = tensors.get("norm.weight")
    described = describe(
        raw, str(folder / "config.json"), names=tensors.keys(), target_layers=target_layers, writer=writer,
        plain_norm=norm is None or (norm.numel() <= 2**20 and bool((norm == 1).all())),
    )
    config = described.config
    try:
        shapes = expected_shapes(config)
    except DraftscopeError as error:
        raise DraftscopeError(error.what, where=str(folder / "config.json"), remedy=error.remedy) from None
    optional = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "d2t": (config.draft_vocab_size,),
                "t2d": (config.vocab_size,), "norm.weight": (config.hidden_size,)}
    for layer in range(1, config.layers):
        optional |= {f"layers.{layer}.{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "hidden_norm")}
    known = optional | shapes
    for name, tensor in tensors.items():
        if name in known and tuple(tensor.shape) != known[name]:
            raise DraftscopeError(f"tensor {spelt[name]} has shape {list(tensor.shape)}, the configuration asks for "
                                  f"{list(known[name])}", where=str(folder),
                                  remedy="config.json and weights do not belong together")
        whole = name in ("d2t", "t2d")
        if name in known and (tensor.is_complex() or (whole and tensor.is_floating_point()) or
                              (not whole and not tensor.is_floating_point())):
            raise DraftscopeError(f"tensor {spelt[name]} is stored as {str(tensor.dtype).removeprefix('torch.')}",
                                  where=str(folder), remedy="Weights are floats, d2t is int64 and t2d bool")
    _bounded(shapes, tensors, folder)
    needed = [*shapes, *(["d2t"] if config.draft_vocab_size != config.vocab_size else [])]
    return Checkpoint(
        folder=folder, config=config, raw=raw, tensors={n: t for n, t in tensors.items() if n in known},
        missing=tuple(n for n in needed if n not in tensors), unexpected=tuple(spelt[n] for n in tensors if n not in known),
        layer_ids=described.layer_ids, layer_ids_key=described.layer_ids_key, notes=(*notes, *described.notes), spelt=spelt,
        idle={n: t for n, t in tensors.items() if n not in known}, files=tuple(path.name for path in weights.files),
    )


def _bounded(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Missing tensors get initial values; a configuration must not make these fill the memory."""
    held = sum(tensor.numel() for tensor in tensors.values())
    lacking = {name: math.prod(shape) for name, shape in shapes.items() if name not in tensors}
    if lacking and sum(lacking.values()) > _SPARE + _TIMES * held:
        name = max(lacking, key=lambda n: lacking[n])
        raise DraftscopeError(f"the configuration asks for tensor {name} of shape {list(shapes[name])}, which the files lack; "
                              f"they hold {held} values in all", where=str(folder),
                              remedy="config.json and weights do not belong together")


def build_draft(checkpoint: Checkpoint, parts: TargetParts | None = None, reading: Reading | None = None) -> Draft:
    """The draft as a reading makes it: float32, eval mode.

    Tensors that are missing, or `lost` by the reading, stay at a seeded initial value (norms 1, matrices N(0, 0.02), as the
    engines leave them); those that the settings in effect have no use for are dropped. The embedding is the checkpoint's own,
    else the target's; a head that is absent over the whole vocabulary is the target's. Target ids beyond the vocabulary, as
    a map of the wrong meaning yields, are clamped to the last id.

    Raises:
        DraftscopeError: an unknown setting, or one that contradicts a tensor's shape.
    """
    reading = reading or Reading()
    settings = dict(reading.settings)
    if reading.feedback is not None:
        settings["norm_output"] = reading.feedback == "post"
    where = str(checkpoint.folder)
    try:
        config = DraftConfig.model_validate(checkpoint.config.model_dump() | settings)
    except ValidationError as error:
        raise invalid("setting", error, where) from None
    _bounded(expected_shapes(config), checkpoint.tensors, checkpoint.folder)
    draft = Draft(config)
    # What the configuration has no use for may have one under the settings in effect.
    held = {**checkpoint.idle, **checkpoint.tensors}
    if reading.lost:
        held = {name: tensor for name, tensor in held.items() if not name.startswith(reading.lost)}
    if reading.altered:
        held = altered(held, reading.altered, config, parts)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            tensor = held.get(name)
            if tensor is None and name == "lm_head.weight" and _shares_head(config, parts) and name in checkpoint.missing:
                assert parts is not None
                tensor = parts.head
            if tensor is None:
                parameter.copy_(initial_value(name, parameter, reading.seed))
            elif tensor.shape != parameter.shape:
                raise DraftscopeError(f"tensor {name} has shape {list(tensor.shape)}, the settings in effect ask for "
                                      f"{list(parameter.shape)}", where=where)
            else:
                parameter.copy_(tensor)
    draft.target_ids = target_ids(held.get("d2t"), config, reading.d2t)
    draft.runtime = reading.runtime
    embedding = held.get("embed_tokens.weight")
    if embedding is None and parts is not None:
        embedding = parts.embedding
        if embedding.shape[1] != config.hidden_size:
            raise DraftscopeError(f"the checkpoint has no embedding, and the target's is {embedding.shape[1]} wide, the draft "
                                  f"{config.hidden_size}", where=where)
    elif embedding is None and "embed_tokens." in reading.lost:
        # An engine that puts the target's embedding in its place; with no target at hand the draft's own has to do.
        embedding = checkpoint.tensors.get("embed_tokens.weight")
    draft.embedding = None if embedding is None else embedding.float()
    return draft.float().eval().requires_grad_(False)


def initial_value(name: str, like: Tensor, seed: int) -> Tensor:
    """What a tensor holds before anything is loaded: norms ones, biases zeros, matrices N(0, 0.02), by name and seed alone."""
    if like.ndim == 1:
        return torch.zeros(like.shape) if name.endswith(".bias") else torch.ones(like.shape)
    draw = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
    return torch.randn(like.shape, generator=draw) * 0.02


def target_ids(d2t: Tensor | None, config: DraftConfig, meaning: D2T = "offset") -> Tensor:
    """Target id of every draft id [D] int64; without a map the draft ids themselves."""
    own = torch.arange(config.draft_vocab_size)
    if d2t is None or meaning == "zero":
        ids = own
    else:
        ids = d2t.long() if meaning == "absolute" else own + d2t.long()
    return ids.clamp(0, config.vocab_size - 1)


def save_native(folder: Path | str, draft: Draft, d2t: Tensor | None, *, dtype: torch.dtype = torch.bfloat16,
                target_layers: int | None = None, extra: Mapping[str, Any] | None = None) -> None:
    """Save a draft as SGLang and vLLM read it; both files are replaced atomically.

    Default boundaries are left unsaid, because there the engines agree. Others are written as
    `eagle_config.eagle_aux_hidden_state_layer_ids` in SGLang's and SpecForge's meaning, id = boundary - 1. vLLM's V1 runner
    takes these ids raw, one layer lower, and its V2 runner ignores them for the defaults: for vLLM add a top-level key of the
    same name that holds the boundaries themselves (SGLang does not look there). The embedding is not saved: it is the target's.

    Args:
        d2t: [D] int64 offsets; None where the draft's vocabulary is the target's.
        target_layers: decoder layers of the target, so that default boundaries are known to be such.
        extra: further keys for config.json; they win.
    """
    folder = Path(folder)
    config = draft.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in draft.named_parameters()}
    if d2t is not None:
        tensors["d2t"] = d2t.long().contiguous()
        chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
        chosen[target_ids(d2t, config)] = True
        tensors["t2d"] = chosen
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    text = json.dumps(native_config(config, dtype, target_layers) | dict(extra or {}), indent=2) + "\n"
    save_text(folder / "config.json", text)


def _shares_head(config: DraftConfig, parts: TargetParts | None) -> bool:
    return parts is not None and tuple(parts.head.shape) == (config.draft_vocab_size, config.hidden_size)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        folder = path.parent
        what = "no config.json here" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
        raise DraftscopeError(what, where=str(folder), remedy="Give the folder of a draft checkpoint")
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise DraftscopeError("not a JSON object", where=str(path))
    return raw
