"""Draft checkpoints from one form to another: native, speculators, and the flattened form that an engine takes.

What is written is read back before it gets its name: every tensor must be bit-equal and every switch the same, and where it
is for an engine, the engine's own reading of it (`consumers`) must be what the draft says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftscope.consumers import CONSUMERS, Effective, config_for, consumer, effective
from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint, target_ids
from draftscope.eagle3.config import DraftConfig
from draftscope.eagle3.copying import check_new, whole_folder
from draftscope.eagle3.dialects import LAYER_IDS, Writer
from draftscope.eagle3.writing import (
    LAYER_KEYS,
    NATIVE_KEYS,
    NESTED_KEYS,
    SPECULATORS_KEYS,
    beyond_speculators,
    native_config,
    speculators_config,
)
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.tensorfile import save_tensors
from draftscope.target.parts import TargetParts, read_config, read_parts

FORMS = ("native", "speculators")
_OURS = "draftscope"  # the key under which config.json keeps what only another dialect has words for
_APART = {"dialect", "boundaries", "double_norm"}  # checked by themselves, or in no file
_REWRITTEN = {"tie_word_embeddings", "later_norm"}  # said otherwise to an engine, so that it comes to the same


@dataclass(frozen=True, slots=True)
class ConvertedDraft:
    """What was written.

    Attributes:
        to: the form or consumer.
        steps: every change from the source, in words.
        caveats: what holds only under a condition that could not be checked.
        left: files of the source folder that were not carried over.
    """

    folder: Path
    to: str
    tensors: int
    steps: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def convert_draft(folder: Path, to: str, out: Path, *, target: Path | None = None,
                  writer: Writer | None = None) -> ConvertedDraft:
    """Write a checkpoint in another form; `out` appears whole or not at all.

    Args:
        to: `native`, `speculators`, or a consumer (`sglang@0.5.23`, `vllm@0.32`).
        target: the target's folder: config.json, and weights where embeddings are to be compared or carried over.
        writer: whose trainer wrote the source, where that changes what a key means.

    Raises:
        UsageError: an unknown form, or a folder that holds something already.
        DraftscopeError: the source can't be read, or the form or consumer can't honour something of it, which is named.
    """
    name = to if to in FORMS else _consumer(to)
    check_new(out)
    facts = None if target is None else read_config(target)
    layers = None if facts is None else int(facts["num_hidden_layers"])
    checkpoint = load_checkpoint(folder, target_layers=layers, writer=writer)
    work = _Work(checkpoint, name, target, facts, layers)
    raw, tensors = work.made()
    with whole_folder(out) as (temporary, keep):
        save_tensors(temporary / "model.safetensors", tensors, {"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        work.check(temporary, tensors)
        keep()
    written = {"config.json", *(path.name for path in folder.glob("*.index.json")), *checkpoint.files}
    left = sorted(path.name for path in folder.iterdir() if path.name not in written)
    return ConvertedDraft(out, name, len(tensors), work.steps, work.caveats, left)


def _consumer(to: str) -> str:
    try:
        known, runner = consumer(to)
    except UsageError:
        listed = ", ".join([*FORMS, *CONSUMERS])
        raise UsageError(f"no form or consumer {to!r} for a checkpoint", remedy=f"Known: {listed}") from None
    return f"{known.id}:{runner}" if runner else known.id


class _Work:
    """One conversion: what is written, and what there is to say about it."""

    def __init__(self, checkpoint: Checkpoint, to: str, target: Path | None, facts: Mapping[str, Any] | None,
                 layers: int | None) -> None:
        self.checkpoint, self.to, self.target, self.facts, self.layers = checkpoint, to, target, facts, layers
        self.steps, self.caveats = list(checkpoint.notes), list[str]()
        said = checkpoint.layer_ids is not None
        # Default places are left unsaid: there all consumers agree.
        self.config = checkpoint.config if said else checkpoint.config.model_copy(update={"boundaries": None})
        self.model_type = None if facts is None else str(facts["model_type"])
        self.engine = to.partition("@")[0]

    def made(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors of the new form."""
        tensors = self._tensors()
        if self.to == "speculators":
            if lacking := beyond_speculators(self.config):
                raise self._refused("speculators 0.9.0", lacking)
            return self._speculators(), tensors
        raw = self._native(tensors)
        if self.to != "native":
            self._ids(raw)
        return raw, tensors

    def check(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Read back what was written; raise where anything is not as it was."""
        again = load_checkpoint(folder, target_layers=self.layers)
        for name, tensor in tensors.items():
            native = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
            held = again.tensors.get(native, again.idle.get(native))
            if held is None or held.dtype != tensor.dtype or not _same(held, tensor):
                raise DraftscopeError(f"tensor {name} did not come back as it was written", where=str(folder))
        apart = _APART if self.to in FORMS else _APART | _REWRITTEN
        was, now = (c.model_dump(exclude=apart) for c in (self.config, again.config))
        if lost := [f"{key}: {_said(was[key])}" for key in was if was[key] != now[key]]:
            raise self._refused(f"the {self.to} form", lost)
        if self.config.boundaries is not None and self.to in FORMS and again.config.boundaries != self.config.boundaries:
            raise self._refused(f"the {self.to} form", [f"boundaries {list(self.config.boundaries)}"])
        if self.to not in FORMS:
            self._serves(effective(again, self.to, self.layers, self.model_type), again.config)

    def _serves(self, read: Effective, config: DraftConfig) -> None:
        changed = dict(read.changed)
        if self.engine == "sglang" and config.sliding_layers is None and changed.get("sliding_window", (0, 0))[1] is None:
            width, _ = changed.pop("sliding_window", (None, None))
            if width is not None:
                self.caveats.append(f"start sglang with --speculative-draft-window-size {width}: the file can't say it")
        lacking = [f"{key}: {_said(was)} (it takes {_said(now)})" for key, (was, now) in changed.items()]
        for key in ("norm_before_head", "fc_bias", "attention_bias", "attention_output_bias", "mlp_bias"):
            if key not in read.reading.settings and getattr(config, key) != DraftConfig.model_fields[key].default:
                lacking.append(f"{key}: {_said(getattr(config, key))} (nothing is known of it)")
        lacking += _beyond_latent(config, self.engine)
        if self.config.boundaries is not None and read.boundaries != self.config.boundaries:
            lacking.append(f"boundaries {list(self.config.boundaries)} (it takes {read.boundaries})")
        if lacking:
            raise self._refused(self.to, lacking)
        if not read.loads:
            raise DraftscopeError(f"{self.to} does not load it: {'; '.join(read.notes)}", where=str(self.checkpoint.folder),
                                  remedy="Nothing was written")
        self._embedding(read)
        self.caveats += [f"tensor {name} is missing here too" for name in read.initial]

    def _embedding(self, read: Effective) -> None:
        if read.embedding != "target" or "embed_tokens.weight" not in self.checkpoint.tensors:
            return
        parts = self._parts()
        own = self.checkpoint.tensors["embed_tokens.weight"]
        if parts is None:
            self.caveats.append(f"{self.to} puts the target's embedding in place of the draft's; give --target to compare them")
        elif not _alike(own, parts.embedding):
            raise self._refused(self.to, ["embed_tokens.weight (it takes the target's, and the draft's differs)"])

    def _refused(self, by: str, what: list[str]) -> DraftscopeError:
        return DraftscopeError(f"{by} can't honour {'; '.join(what)}", where=str(self.checkpoint.folder),
                               remedy="Nothing was written. Convert to another form, or train without it")

    def _parts(self) -> TargetParts | None:
        has_weights = self.target is not None and any(self.target.glob("*.safetensors"))
        return read_parts(self.target) if self.target is not None and has_weights else None

    def _tensors(self) -> dict[str, Tensor]:
        held, config = dict(self.checkpoint.tensors), self.config
        whole = config.draft_vocab_size == config.vocab_size
        if self.to in FORMS:
            held |= self.checkpoint.idle
        else:
            for name in self.checkpoint.idle:
                self.steps.append(f"tensor {self.checkpoint.spelt[name]} left out: this configuration has no use for it")
            if whole and "d2t" in held and not bool(held["d2t"].any()):
                del held["d2t"]
                held.pop("t2d", None)
                self.steps.append("d2t left out: the vocabularies are equal, and it changes nothing")
            held = self._later_norms(held)
        if self.to != "speculators":
            return held
        if not whole and "d2t" in held and "t2d" not in held:
            chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
            chosen[target_ids(held["d2t"], config)] = True
            held["t2d"] = chosen
            self.steps.append("t2d made from d2t")
            if bool((target_ids(held["d2t"], config).diff() <= 0).any()):
                self.caveats.append("d2t is not ascending; speculators' trainer takes the head's rows to be in ascending order")
        if "embed_tokens.weight" not in held:
            parts = self._parts()
            if parts is not None and parts.embedding.shape == (config.vocab_size, config.hidden_size):
                held["embed_tokens.weight"] = parts.embedding.contiguous()
                self.steps.append("embed_tokens.weight taken from the target")
            else:
                self.caveats.append("embed_tokens.weight is missing, and speculators 0.9 does not dependably take it from the "
                                    "target: give --target with its weights")
        if "lm_head.weight" not in held:
            self.caveats.append("lm_head.weight is missing, and speculators 0.9 does not dependably take it from the target")
        return {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in held.items()}

    def _later_norms(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """Further layers' norm before attention under the name that the engine looks for."""
        wanted, own = ("hidden_norm" if self.engine == "sglang" else "input_layernorm"), self.config.later_norm
        if self.config.layers == 1 or own == wanted:
            return held
        for layer in range(1, self.config.layers):
            tensor = held.pop(f"layers.{layer}.{own}.weight", None)
            if tensor is not None:
                held[f"layers.{layer}.{wanted}.weight"] = tensor
        self.steps.append(f"the later layers' {own} renamed {wanted}, which is what {self.engine} applies there")
        self.config = self.config.model_copy(update={"later_norm": wanted})
        return held

    def _native(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        raw, kept = self.checkpoint.raw, _kept(self.checkpoint.raw)
        if self.config.dialect == "native":
            passed, nested = _passed(raw)
            kept.pop("native", None)
        else:
            restored = kept.pop("native", {})
            passed, nested = dict(restored.get("config") or {}), dict(restored.get("eagle_config") or {})
            kept["speculators"] = {
                "config": {k: v for k, v in raw.items() if k not in SPECULATORS_KEYS and k != _OURS},
                "layer": {k: v for k, v in raw["transformer_layer_config"].items() if k not in LAYER_KEYS},
            }
            self.steps.append("speculators' configuration flattened; what only it has words for is kept under the key draftscope")
        config = self.config
        if self.to != "native":
            config = config.model_copy(update={"boundaries": None})
            if config.tie_word_embeddings and "lm_head.weight" in tensors:
                config = config.model_copy(update={"tie_word_embeddings": False})
                self.steps.append("tie_word_embeddings: true became false, since the draft has a head of its own")
        made = passed | native_config(config, _dtype(tensors))
        nested |= made.pop("eagle_config", {})
        if nested:
            made["eagle_config"] = nested
        kept = {key: value for key, value in kept.items() if value}
        return made | ({_OURS: kept} if kept else {})

    def _ids(self, raw: dict[str, Any]) -> None:
        """Layer ids where the consumer looks for them, in its own convention."""
        boundaries = self.config.boundaries
        if boundaries is None:
            return
        keys = config_for(self.to, boundaries, self.layers, self.model_type)
        if "not_possible" in keys:
            raise self._refused(self.to, [f"boundaries {list(boundaries)}: {keys['not_possible']}"])
        for key, value in keys.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        said, = _leaves(keys)
        self.steps.append(f"layer ids {list(self.checkpoint.layer_ids or ())} ({self.checkpoint.layer_ids_key}) are boundaries "
                          f"{list(boundaries)}, which {self.to} reads as {said[1]} at {said[0]}")
        if self.model_type is None and self.to.startswith("sglang"):
            self.caveats.append("the ids are written for a Llama-like target; sglang counts otherwise in some: give --target")

    def _speculators(self) -> dict[str, Any]:
        raw, kept = self.checkpoint.raw, _kept(self.checkpoint.raw)
        name, architectures = None, list[str]()
        if self.target is not None and self.facts is not None:
            name, architectures = str(self.target), list(self.facts.get("architectures") or [])
        made = speculators_config(self.config, name, architectures)
        if self.config.dialect == "speculators":
            passed = {k: v for k, v in raw.items() if k not in SPECULATORS_KEYS and k != _OURS}
            layer = {k: v for k, v in raw["transformer_layer_config"].items() if k not in LAYER_KEYS}
            kept.pop("speculators", None)
        else:
            restored = kept.pop("speculators", {})
            passed, layer = dict(restored.get("config") or {}), dict(restored.get("layer") or {})
            top, nested = _passed(raw)
            kept["native"] = {"config": top, "eagle_config": nested} if top or nested else {}
            self.steps.append("configuration written as speculators'; what only the native dialect has words for is kept under "
                              "the key draftscope")
        made = made | passed
        if name is not None:
            made["speculators_config"] |= {"verifier": {"name_or_path": name, "architectures": architectures}}
        elif made["speculators_config"].get("verifier", {}).get("name_or_path") is None:
            self.caveats.append("speculators opens a draft only with its target, and none is named: give --target")
        made["transformer_layer_config"] = layer | made["transformer_layer_config"]
        if self.config.boundaries is not None:
            self.steps.append(f"layer ids {list(self.checkpoint.layer_ids or ())} ({self.checkpoint.layer_ids_key}) became "
                              f"{made[LAYER_IDS]} ({LAYER_IDS})")
        kept = {key: value for key, value in kept.items() if value}
        return made | ({_OURS: kept} if kept else {})


def _beyond_latent(config: DraftConfig, engine: str) -> list[str]:
    """What the engines' drafts with latent attention can't do (SGLang 0.5.23 `models/kimi_k25_eagle3.py`, vLLM 0.32
    `models/deepseek_eagle3.py` and DeepseekV2MLAAttention)."""
    if config.mla is None:
        return []
    found = {
        "rope_interleave: false with mla": not config.mla.rope_interleave,
        "norm_before_fc: true with mla": config.norm_before_fc,
        f"sliding_window: {config.sliding_window} with mla": config.sliding_window is not None,
        "attention_bias: true with mla": config.attention_bias or config.attention_output_bias,
        "q_lora_rank: null": config.mla.q_lora_rank is None,
        f"layers: {config.layers} with mla": engine == "sglang" and config.layers > 1,
        "use_aux_hidden_state: false with mla": not config.use_aux_hidden_state,
    }
    return [name for name, there in found.items() if there]


def _kept(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier conversion kept for another dialect."""
    held = raw.get(_OURS)
    return {k: v for k, v in held.items() if isinstance(v, dict)} if isinstance(held, dict) else {}


def _passed(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keys of a native configuration, and of its `eagle_config`, that `native_config` does not speak for."""
    nested = raw.get("eagle_config") or {}
    return ({k: v for k, v in raw.items() if k not in NATIVE_KEYS and k not in ("eagle_config", _OURS)},
            {k: v for k, v in nested.items() if k not in NESTED_KEYS})


def _leaves(keys: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in keys.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _said(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else str(value)


def _dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """That of the largest matrix."""
    return max((t for t in tensors.values() if t.is_floating_point()), key=lambda t: t.numel()).dtype


def _same(one: Tensor, two: Tensor) -> bool:
    """Bit-equal, NaN included."""
    return one.shape == two.shape and torch.equal(_bytes(one), _bytes(two))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _alike(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and bool(torch.equal(one.to(torch.promote_types(one.dtype, two.dtype)),
                                                       two.to(torch.promote_types(one.dtype, two.dtype))))
