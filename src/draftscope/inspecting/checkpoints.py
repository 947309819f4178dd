"""What is not states: draft checkpoints, targets, single tensor files, reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.boundaries import default_boundaries
from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint
from draftscope.errors import DraftscopeError
from draftscope.findings import Finding
from draftscope.inspecting.report import Inspected
from draftscope.inspecting.rows import short_dtype
from draftscope.inspecting.suspicions import suspect
from draftscope.states.tensorfile import TensorFile, read_json
from draftscope.target.parts import TargetParts, read_parts, tensor_files

DRAFT_NAMES = ("fc.", "midlayer.", "d2t", "t2d")
DRAFT_KEYS = ("draft_vocab_size", "speculators_model_type", "eagle_config")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias",
            "attention_output_bias", "mlp_bias", "fc_bias", "tie_word_embeddings")
UNLESS_OFF = ("norm_before_head", "use_aux_hidden_state")
CLAIMS = ("architectures", "model_type", "speculators_version", "torch_dtype", "dtype")
TENSORS_SHOWN = 64


def is_draft(folder: Path) -> bool:
    """Whether a model folder holds a draft: by its tensors, else by its configuration."""
    try:
        names = list(tensor_files(folder))
    except DraftscopeError:
        names = []
    bare = [name.removeprefix("draft_model.").removeprefix("model.") for name in names]
    if any(name.startswith(DRAFT_NAMES) for name in bare):
        return True
    config = read_json(folder / "config.json")
    if not isinstance(config, dict):
        return False
    named = config.get("architectures")
    return any(key in config for key in DRAFT_KEYS) or (isinstance(named, list) and any("Eagle3" in str(name) for name in named))


def inspect_draft(folder: Path) -> tuple[Inspected, list[Finding]]:
    """A draft checkpoint as it stands, whoever reads it (`lint` says what a consumer makes of it).

    Raises:
        DraftscopeError: it cannot be read or contradicts itself.
    """
    checkpoint = load_checkpoint(folder)
    config = checkpoint.config
    report = Inspected(path=str(folder), what="draft checkpoint", format=config.dialect,
                       chosen="tensors of a draft (fc, midlayer or layers.0) beside config.json")
    switches = {key: getattr(config, key) for key in SWITCHES}
    report.facts = {
        "hidden_size": config.hidden_size, "target_hidden_size": config.target_hidden_size, "slots": config.slots,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "layer_ids": None if checkpoint.layer_ids is None else list(checkpoint.layer_ids),
        "layer_ids_key": checkpoint.layer_ids_key or None,
        "boundaries": None if config.boundaries is None else list(config.boundaries),
        "switches": [*(key for key, value in switches.items() if value),
                     *(f"{key}: false" for key in UNLESS_OFF if not getattr(config, key))],
        "layers": config.layers, "attention": "grouped" if config.mla is None else "latent (MLA)",
        "sliding_window": config.sliding_window,
        "own_embedding": "embed_tokens.weight" in checkpoint.tensors, "d2t": _map_words(checkpoint),
        "dtypes": _dtypes(checkpoint.tensors.values()), "values": sum(t.numel() for t in checkpoint.tensors.values()),
        "missing": list(checkpoint.missing), "unexpected": list(checkpoint.unexpected),
    }
    report.claims = {key: checkpoint.raw[key] for key in CLAIMS if key in checkpoint.raw}
    report.notes = list(checkpoint.notes)
    if checkpoint.unexpected:
        report.notes.append(f"tensors that this configuration has no use for: {', '.join(checkpoint.unexpected[:8])}")
    findings = [*_unsound(checkpoint.tensors.items()), *_missing(checkpoint), *_map(checkpoint)]
    return report, findings


def _map_words(checkpoint: Checkpoint) -> str:
    d2t = checkpoint.tensors.get("d2t")
    if checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size:
        return "not needed" if d2t is None else "there, but not needed"
    return "missing" if d2t is None else f"offsets {int(d2t.min())}..{int(d2t.max())}"


def _missing(checkpoint: Checkpoint) -> Iterator[Finding]:
    whole = checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size
    missing = [name for name in checkpoint.missing if name != "d2t" and not (name == "lm_head.weight" and whole)]
    if missing:
        yield suspect(
            "weight-missing", [f"tensor {name}" for name in missing[:8]], f"{len(missing)} tensors are missing", "proven",
            "needs-retraining", "Export the checkpoint again; engines leave a missing tensor at its initial value silently",
            measured="tensors of the files against those that the configuration asks for", result=", ".join(missing[:16]),
            decides="all are there",
        )
    if "d2t" in checkpoint.missing:
        yield suspect(
            "vocab-map", ["tensor d2t"], "the draft's vocabulary is smaller than the target's, and no map names its tokens",
            "proven", "needs-retraining", "Store d2t with the checkpoint: target id = draft id + d2t[draft id]",
            measured="tensors of the files", decides="d2t is there",
            result=f"draft vocabulary {checkpoint.config.draft_vocab_size} of {checkpoint.config.vocab_size}, no d2t",
        )


def _map(checkpoint: Checkpoint) -> Iterator[Finding]:
    d2t, config = checkpoint.tensors.get("d2t"), checkpoint.config
    if d2t is None or config.draft_vocab_size == config.vocab_size:
        return
    ids = torch.arange(len(d2t)) + d2t.long()
    what = None
    if not bool(d2t.any()):
        what = "the vocabulary map is all zero: the draft's tokens are the first ids of the vocabulary"
    elif bool((ids >= config.vocab_size).any()) or bool((ids < 0).any()):
        what = "the vocabulary map leads beyond the vocabulary: it holds target ids where offsets belong"
    elif len(ids.unique()) < len(ids):
        what = "the vocabulary map names tokens twice"
    if what is not None:
        yield suspect(
            "vocab-map", ["tensor d2t"], what, "supported", "needs-retraining",
            "Rebuild the map from t2d or the training counts: target id = draft id + d2t[draft id]",
            measured="target ids that the map leads to", decides="distinct ids inside the vocabulary",
            result=f"{int(ids.min())}..{int(ids.max())}, {len(ids.unique())} distinct of {len(ids)}",
        )


def _unsound(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Finding]:
    bad: dict[str, int] = {}
    zero: list[str] = []
    for name, tensor in tensors:
        if not tensor.dtype.is_floating_point or tensor.numel() == 0:
            continue
        blocks = [block.float() for block in tensor.flatten().split(2**24)]
        count = sum(int((~block.isfinite()).sum()) for block in blocks)
        if count:
            bad[name] = count
        elif not any(bool(block.any()) for block in blocks):
            zero.append(name)
    if bad:
        yield suspect(
            "nonfinite", [f"tensor {name}" for name in list(bad)[:8]], f"NaN or Inf in {len(bad)} tensors", "proven",
            "needs-retraining", "Go back to the last checkpoint without them", measured="every value of every tensor",
            result=", ".join(f"{name}: {count}" for name, count in list(bad.items())[:16]), decides="no value is NaN or Inf",
            figures=bad,
        )
    if zero:
        yield suspect(
            "weight-missing", [f"tensor {name}" for name in zero[:8]], f"{len(zero)} tensors hold nothing but zeros", "suspected",
            "needs-retraining", "Export the checkpoint again: these look as if they were never filled",
            measured="every value of every tensor", result=", ".join(zero[:16]), decides="trained weights are not all zero",
        )


def inspect_target(folder: Path) -> tuple[Inspected, list[Finding]]:
    """A target, or its parts alone.

    Raises:
        DraftscopeError: not even the parts are there.
    """
    parts = read_parts(folder)
    files = tensor_files(folder)
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    layers = {name.split("layers.")[1].split(".")[0] for name in files if "layers." in name and files[name].is_file()}
    report = Inspected(path=str(folder), what="target", format=parts.model_type,
                       chosen="config.json and tensors of a language model, none of a draft")
    report.facts = {
        "layers": parts.layers, "hidden_size": parts.width, "vocab_size": parts.vocab,
        "tied_head": parts.head is parts.embedding, "embed_scale": parts.embed_scale, "norm_offset": parts.norm_offset,
        "dtype": short_dtype(parts.embedding.dtype), "weights": _weights_words(parts, layers, absent),
        "default_boundaries": list(default_boundaries(parts.layers)),
    }
    if absent:
        report.notes.append(f"files named by the index but absent: {', '.join(absent[:6])}")
    named = {"embedding": parts.embedding, "final norm": parts.norm_weight}
    if parts.head is not parts.embedding:
        named["head"] = parts.head
    return report, list(_unsound(named.items()))


def _weights_words(parts: TargetParts, layers: set[str], absent: list[str]) -> str:
    if not layers:
        return "parts only (embedding, final norm, head)"
    held = f"{len(layers)} of {parts.layers} layers"
    return f"{held}, {len(absent)} files absent" if absent else held


def inspect_tensors(file: Path) -> tuple[Inspected, list[Finding]]:
    """Any safetensors file: its tensors by name, shape and dtype.

    Raises:
        DraftscopeError: it cannot be read.
    """
    opened = TensorFile(file)
    names = sorted(opened.names)
    report = Inspected(path=str(file), what="tensors", format="safetensors", chosen="no known layout of states", files=1)
    held = [(name, opened.tensor(name)) for name in names]
    report.facts = {
        "tensors": len(names), "values": sum(tensor.numel() for _, tensor in held), "dtypes": _dtypes(t for _, t in held),
        "shapes": {name: f"{short_dtype(tensor.dtype)} {list(tensor.shape)}" for name, tensor in held[:TENSORS_SHOWN]},
    }
    report.claims = dict(list(opened.metadata.items())[:24])
    return report, list(_unsound(held))


def inspect_report(file: Path) -> tuple[Inspected, list[Finding]]:
    """A JSON file of draftscope's own.

    Raises:
        DraftscopeError: not JSON, or of somebody else.
    """
    held = read_json(file, limit=256 * 2**20)
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, str) or not schema.startswith("draftscope."):
        raise DraftscopeError("is JSON, but no report of draftscope", where=str(file),
                              remedy="Name a file or folder of states, a checkpoint or a target")
    facts: dict[str, Any] = {"schema": schema, "verdict": held.get("verdict")}
    if isinstance(held.get("findings"), list):
        facts["findings"] = [str(f.get("fault")) for f in held["findings"] if isinstance(f, dict)]
    return Inspected(path=str(file), what="report", format=schema, chosen="its schema", files=1, facts=facts), []


def _dtypes(tensors: Iterable[Tensor]) -> dict[str, int]:
    return dict(Counter(short_dtype(tensor.dtype) for tensor in tensors))
