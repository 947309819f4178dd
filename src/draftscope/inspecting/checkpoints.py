"""What is not states: draft checkpoints, targets, single tensor files, reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from draftscope.boundaries import default_boundaries
from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint
from draftscope.errors import DraftscopeError
from draftscope.findings import Finding
from draftscope.inspecting.report import Inspected
from draftscope.inspecting.rows import short_dtype
from draftscope.linting.values import missing_tensors, unsound
from draftscope.linting.vocabulary import map_findings
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile, read_json
from draftscope.target.parts import TargetParts, read_parts, tensor_files

DRAFT_NAMES = ("fc.", "midlayer.", "d2t", "t2d")
MODEL_KEYS = ("architectures", "hidden_size", "speculators_model_type", "transformer_layer_config", "draft_vocab_size")
FEW_LAYERS = 4
"""A model of no more whose tensors cannot be listed, as those of torch files, is taken for a draft."""
DRAFT_KEYS = ("draft_vocab_size", "speculators_model_type", "eagle_config")
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "attention_bias",
            "attention_output_bias", "mlp_bias", "fc_bias", "tie_word_embeddings")
UNLESS_OFF = ("norm_before_head", "use_aux_hidden_state")
CLAIMS = ("architectures", "model_type", "speculators_version", "torch_dtype", "dtype")
TENSORS_SHOWN = 64


def is_draft(folder: Place) -> bool:
    """Whether a folder holds a draft's checkpoint: by its tensors, else by its configuration.

    Raises:
        DraftscopeError: no tensors tell, and the configuration cannot be read.
    """
    if not (folder / "config.json").is_file():
        return False
    config, unread = None, None
    try:
        config = read_json(folder / "config.json")
    except DraftscopeError as error:
        unread = error
    if isinstance(config, dict) and not any(key in config for key in MODEL_KEYS):
        return False  # a writer's note beside data, whose files may be many
    try:
        names = list(tensor_files(folder))
    except DraftscopeError:
        names = []
    bare = [name.removeprefix("draft_model.").removeprefix("model.") for name in names]
    if any(name.startswith(DRAFT_NAMES) for name in bare):
        return True
    if unread is not None and not names:
        raise unread
    if not isinstance(config, dict):
        return False
    named, layers = config.get("architectures"), config.get("num_hidden_layers", 1)
    if any(key in config for key in DRAFT_KEYS) or (isinstance(named, list) and any("Eagle3" in str(name) for name in named)):
        return True
    return not names and isinstance(layers, int) and layers <= FEW_LAYERS


def inspect_draft(folder: Place) -> tuple[Inspected, list[Finding]]:
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
    findings = [*unsound(checkpoint.tensors.items()), *missing_tensors(checkpoint), *map_findings(checkpoint)]
    return report, findings


def _map_words(checkpoint: Checkpoint) -> str:
    d2t = checkpoint.tensors.get("d2t")
    if checkpoint.config.draft_vocab_size == checkpoint.config.vocab_size:
        return "not needed" if d2t is None else "there, but not needed"
    return "missing" if d2t is None else f"offsets {int(d2t.min())}..{int(d2t.max())}"


def inspect_target(folder: Place) -> tuple[Inspected, list[Finding]]:
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
    return report, list(unsound(named.items()))


def _weights_words(parts: TargetParts, layers: set[str], absent: list[str]) -> str:
    if not layers:
        return "parts only (embedding, final norm, head)"
    held = f"{len(layers)} of {parts.layers} layers"
    return f"{held}, {len(absent)} files absent" if absent else held


def inspect_tensors(file: Place) -> tuple[Inspected, list[Finding]]:
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
    return report, list(unsound(held))


def inspect_report(file: Place) -> tuple[Inspected, list[Finding]]:
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
