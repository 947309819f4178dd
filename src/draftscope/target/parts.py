"""Target parts: embedding, final norm and head, read without running or even holding the rest of the target."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.leftover import lasting_workspace
from draftscope.states.places import Place, Remote, matching, place
from draftscope.states.tensorfile import TensorFile, read_index, read_json
from draftscope.target.families import embed_scale, family_of
from draftscope.target.sizes import BELONGS, check_config, check_depth

_HEAD_CHUNK = 16384


@dataclass(slots=True)
class TargetParts:
    """The ends of a target.

    Attributes:
        embedding: [V, Ht] as stored.
        norm_weight: [Ht] as stored; the norm multiplies by `norm_offset` + weight.
        norm_offset: 1.0 for the norms of the Gemma kind, else 0.0.
        head: [V, Ht] as stored, the embedding itself where the two are tied.
        layers: decoder layers of the target.
        embed_scale: factor from an embedding row to boundary 0, exact; a target that runs in bfloat16 rounds it (Gemma's
            root of 3072, 55.43, to 55.5).
        softcap, logit_divisor: what the target does to its logits.
    """

    embedding: Tensor
    norm_weight: Tensor
    norm_eps: float
    norm_offset: float
    head: Tensor
    layers: int
    embed_scale: float
    model_type: str
    folder: Place
    softcap: float | None = None
    logit_divisor: float = 1.0

    @property
    def width(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def vocab(self) -> int:
        return int(self.head.shape[0])

    def fingerprint(self) -> str:
        """Short text that changes with the weights of the norm, and of some rows of the embedding and of a head of its own."""
        seen = hashlib.sha256()
        tied = self.head.data_ptr() == self.embedding.data_ptr()
        for tensor in (self.norm_weight, self.embedding[:64], *(() if tied else (self.head[-64:],))):
            seen.update(tensor.float().cpu().contiguous().numpy().tobytes())
        return seen.hexdigest()[:16]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Boundary 0 of token ids [...]: [..., Ht] float32."""
        return F.embedding(token_ids, self.embedding).float() * self.embed_scale

    def final_norm(self, x: Tensor) -> Tensor:
        """The final norm of states [..., Ht] of any float dtype, in float32."""
        x = x.float()
        scale = self.norm_weight.float() + self.norm_offset
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm_eps) * scale

    def logits(self, x_post: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logits [..., V] float32 of states [..., Ht] after the final norm; `head` stands in for the product with the head."""
        x = x_post.float()
        if head is not None:
            logits = head(x)
        elif self.head.dtype == torch.float32:
            logits = F.linear(x, self.head)
        else:
            logits = torch.cat([F.linear(x, rows.float()) for rows in self.head.split(_HEAD_CHUNK)], -1)
        if self.logit_divisor != 1.0:
            logits = logits / self.logit_divisor
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def read_parts(folder: Place) -> TargetParts:
    """Read a target's parts from `config.json` and safetensors (one file, shards with or without an index).

    Only these tensors are read; of a sharded target only the shards that hold them need be there.

    Raises:
        DraftscopeError: a file or tensor is missing, truncated, quantized, or of a width that contradicts the others.
    """
    config = read_config(folder)
    where = tensor_files(folder)
    prefix = text_prefix(where, folder)
    tied = bool(config["tie_word_embeddings"])
    names = [f"{prefix}embed_tokens.weight", f"{prefix}norm.weight"]
    head_name = next((n for n in _head_names(prefix) if n in where), None)
    if not tied:
        if head_name is None:
            raise DraftscopeError(
                "no head: lm_head.weight is missing and the config does not tie it to the embedding", where=str(folder),
                remedy='Add lm_head.weight, or set "tie_word_embeddings": true where the target ties them',
            )
        names.append(head_name)
    tensors = read_tensors(folder, where, names)
    embedding, norm = tensors[names[0]], tensors[names[1]]
    head = embedding if tied else tensors[names[2]]
    width = config["hidden_size"]
    for name, tensor, dims in ((names[0], embedding, 2), (names[1], norm, 1), (names[-1] if not tied else names[0], head, 2)):
        if tensor.dim() != dims or tensor.shape[-1] != width:
            raise DraftscopeError(
                f"{name} has shape {list(tensor.shape)}, but hidden_size is {width}", where=str(folder), remedy=BELONGS,
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise DraftscopeError(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}", where=str(folder),
                remedy="Target parts must be plain floats: take them from the unquantized model",
            )
    if len(head) != len(embedding):
        raise DraftscopeError(f"the head has {len(head):,} rows, the embedding {len(embedding):,}", where=str(folder),
                              remedy=BELONGS)
    check_depth(config, where, prefix, str(folder / "config.json"))
    return assemble(config, embedding, norm, head, folder)


def assemble(config: Mapping[str, Any], embedding: Tensor, norm: Tensor, head: Tensor, folder: Place) -> TargetParts:
    """Target parts from tensors at hand and a flat text config."""
    family = family_of(config["model_type"])
    divisor = 1.0 if family.logit_divisor is None else float(config.get(family.logit_divisor) or 1.0)
    return TargetParts(
        embedding=embedding, norm_weight=norm, norm_eps=float(config["rms_norm_eps"]), norm_offset=family.norm_offset,
        head=head, layers=int(config["num_hidden_layers"]), embed_scale=embed_scale(family, config),
        model_type=config["model_type"], folder=folder, softcap=config.get("final_logit_softcapping"), logit_divisor=divisor,
    )


def _nearby(folder: Place) -> str:
    below = [] if isinstance(folder, Remote) else sorted({*folder.glob("*/config.json"), *folder.glob("*/*/config.json")})
    if below:
        return f"There is one in {', '.join(str(path.parent) for path in below[:3])}"
    return "Copy it from the target's model folder"


def read_config(folder: Place) -> dict[str, Any]:
    """A target's text config, flat, with transformers' defaults where the file leaves out what parts need."""
    path = folder / "config.json"
    if not folder.is_dir():
        raise DraftscopeError("no such folder", where=str(folder), remedy="--target names the folder of the target's config.json")
    if not path.exists():
        raise DraftscopeError("config.json is missing", where=str(folder), remedy=_nearby(folder))
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise DraftscopeError("is not a JSON object", where=str(path))
    inner = raw.get("text_config", raw)
    if not isinstance(inner, dict):
        raise DraftscopeError("text_config is not a JSON object", where=str(path))
    config = dict(inner)
    if "tie_word_embeddings" not in config and "tie_word_embeddings" in raw:
        config["tie_word_embeddings"] = raw["tie_word_embeddings"]
    check_config(config, str(path))
    needed = ("model_type", "hidden_size", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings")
    if any(key not in config for key in needed) and "model_type" in config:
        config = _defaults(config["model_type"], config) | config
    config.setdefault("tie_word_embeddings", False)
    lacking = [key for key in needed if config.get(key) is None]
    if lacking:
        raise DraftscopeError(f"lacks {', '.join(lacking)}", where=str(path), remedy="Take config.json from the target itself")
    check_config(config, str(path))
    return config


def _defaults(model_type: str, given: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    # A type that transformers does not know, or values that it rejects, leave what the file says.
    with suppress(Exception):
        return dict(AutoConfig.for_model(model_type, **{k: v for k, v in given.items() if k != "model_type"}).to_dict())
    return {}


def tensor_files(folder: Place) -> dict[str, Place]:
    """Every tensor name of a safetensors model folder, and the file that holds it (which may be absent).

    Raises:
        DraftscopeError: no safetensors, one that is not whole, or an index that leads out of the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in read_index(index).items()}
    files = matching(folder, ".safetensors")
    if not files:
        other = [path.name for path in matching(folder, (".bin", ".pt", ".pth", ".gguf"))]
        held = f"; it holds {', '.join(other[:3])}" if other else ""
        raise DraftscopeError(
            f"no safetensors file{held}", where=str(folder),
            remedy="Weights are read from safetensors alone: save the target with save_pretrained(..., safe_serialization=True)",
        )
    found: dict[str, Place] = {}
    for file in files:
        found |= dict.fromkeys(TensorFile(file).names, file)
    return found


def read_tensors(folder: Place, where: Mapping[str, Place], names: list[str]) -> dict[str, Tensor]:
    """Read named tensors, opening only the files that hold them."""
    lacking = [name for name in names if name not in where]
    if lacking:
        raise DraftscopeError(f"tensor {', '.join(lacking)} is missing", where=str(folder),
                              remedy=f"The files hold {_few(where)}")
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(where[name] for name in names):
        wanted = [name for name in names if where[name] == file]
        if not file.is_file():
            raise DraftscopeError(f"missing, and it holds {', '.join(wanted)}", where=str(file),
                                  remedy="Copy this shard from the target's model folder")
        opened = TensorFile(file)
        tensors |= {name: opened.tensor(name) for name in wanted}
    return tensors


def target_folder(given: str | Place) -> Path:
    """A target's folder on a local disk: of a URL, its configuration and parts in a folder of the same name, gone at exit.

    Raises:
        DraftscopeError: as `read_parts`.
    """
    at = place(given)
    if not isinstance(at, Remote):
        return at
    parts = read_parts(at)
    folder = lasting_workspace() / (at.name or "target")
    folder.mkdir()
    (folder / "config.json").write_bytes((at / "config.json").read_bytes())
    names = {"model.embed_tokens.weight": parts.embedding, "model.norm.weight": parts.norm_weight}
    if parts.head is not parts.embedding:
        names["lm_head.weight"] = parts.head
    save_file(names, folder / "model.safetensors")
    return folder


def text_prefix(names: Mapping[str, Place], folder: Place) -> str:
    """What stands before `embed_tokens.` and `layers.` in the names of the text model's tensors."""
    suffix = "embed_tokens.weight"
    # A multi-token-prediction block repeats the embedding inside `layers.`, and vision towers have tables of their own.
    found = sorted((n for n in names if n.endswith(suffix) and "layers." not in n and "vision" not in n), key=len)
    if not found:
        draft = any(f".{name}".endswith((".fc.weight", ".d2t")) for name in names)
        raise DraftscopeError(f"no tensor called ...{suffix}", where=str(folder), remedy=f"The files hold {_few(names)}" + (
            ": an EAGLE-3 draft, which goes to --draft; --target takes the model that it drafts for" if draft else ""))
    return found[0].removesuffix(suffix)


def _head_names(prefix: str) -> list[str]:
    outer = prefix.removesuffix("model.")
    return [f"{outer}lm_head.weight", "lm_head.weight", f"{prefix}lm_head.weight", "language_model.lm_head.weight"]


def _few(names: Mapping[str, Place]) -> str:
    shown = ", ".join(sorted(names)[:4])
    return f"{shown}, ... ({len(names)} tensors)" if len(names) > 4 else shown or "no tensors"
