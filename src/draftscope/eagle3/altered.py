"""Tensors of a draft as a bad exporter leaves them, or a bad loader has them, by name: for planting, trying and undoing.

    swap A B           the tensors A and B in each other's place (of one shape)
    transpose A        a square matrix the wrong way round
    ones A             a norm's gain left at 1
    fp8 P, int8 P, int4 P
                       matrices under the prefix P rounded: e4m3 without a scale, 8 bits by row, 4 bits by groups of 32
    codes P            matrices under P as 8-bit codes, their scales lost
    packed A           a matrix as bytes, two values in each
    head target rows   the target's head at the draft's target ids in place of the draft's own
    head target first  the target's first rows
    head embedding     the first rows of the embedding that the draft runs with
    head permuted      rows of the draft's head in another order
    map N              every entry of d2t greater by N (t2d stays)
    map other          a map of other data, t2d with it
    map first          a map of the first ids, t2d with it
    map zero           a map of zeros (t2d stays)
    head of first ids  a head for the first ids: rows of those among them that it has, zeros for the others
    map without t2d    no t2d
    map longer, map shorter
                       an entry of d2t too many, or one too few
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftscope.eagle3.config import DraftConfig

if TYPE_CHECKING:
    from draftscope.target.parts import TargetParts

GROUP = 32
FP8 = torch.float8_e4m3fn
_HEAD = "lm_head.weight"


def altered(
    tensors: Mapping[str, Tensor], names: Sequence[str], config: DraftConfig, parts: TargetParts | None = None,
) -> dict[str, Tensor]:
    """The tensors under native names after these alterations, one after another.

    Args:
        parts: the target's, for what is taken from it.

    Raises:
        ValueError: an alteration that is not known, or that these tensors or the lack of a target do not allow.
    """
    held = dict(tensors)
    for name in names:
        kind, _, rest = name.partition(" ")
        if kind == "swap":
            one, two = rest.split()
            if held[one].shape != held[two].shape:
                raise ValueError(f"{one} and {two} have different shapes")
            held[one], held[two] = held[two], held[one]
        elif kind == "transpose":
            held[rest] = held[rest].T.contiguous()
        elif kind == "ones":
            held[rest] = torch.ones_like(held[rest])
        elif kind in ROUNDED:
            for own in matrices(held, rest):
                held[own] = ROUNDED[kind](held[own])
        elif kind == "packed":
            held[rest] = packed(held[rest])
        elif kind == "head":
            held[_HEAD] = _head(held, rest, config, parts)
        elif kind == "map":
            _map(held, rest, config)
        else:
            raise ValueError(f"no alteration {name!r}")
    return held


def matrices(tensors: Mapping[str, Tensor], prefix: str = "") -> list[str]:
    """Names of the linear maps under a prefix: what an engine quantises; embeddings are not among them."""
    return [name for name, tensor in tensors.items() if tensor.ndim == 2 and tensor.is_floating_point()
            and name.startswith(prefix) and not name.startswith("embed_tokens.")]


def map_ids(tensors: Mapping[str, Tensor], config: DraftConfig) -> Tensor:
    """Target ids [D] that the offsets say, within the vocabulary."""
    own = torch.arange(config.draft_vocab_size)
    return (own + tensors["d2t"].long() if "d2t" in tensors else own).clamp(0, config.vocab_size - 1)


def order(size: int) -> Tensor:
    """A fixed order of `size` rows in which hardly one keeps its place."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(11))


def fp8(tensor: Tensor) -> Tensor:
    """A matrix cast to e4m3 and back, without a scale: what is small becomes zero."""
    return tensor.float().clamp(-448, 448).to(FP8).to(tensor.dtype)


def int8(tensor: Tensor) -> Tensor:
    """Rounded to 8 bits, one scale for each row."""
    scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return ((tensor.float() / scale).round() * scale).to(tensor.dtype)


def int4(tensor: Tensor) -> Tensor:
    """Rounded to 4 bits, one scale for each group of a row."""
    rows, wide = tensor.shape
    spare = -wide % GROUP
    grouped = torch.nn.functional.pad(tensor.float(), (0, spare)).unflatten(1, (-1, GROUP))
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((grouped / scale).round() * scale).reshape(rows, wide + spare)[:, :wide].to(tensor.dtype)


def codes(tensor: Tensor) -> Tensor:
    """The 8-bit codes themselves, as whole numbers."""
    scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return (tensor.float() / scale).round().to(tensor.dtype)


def packed(tensor: Tensor) -> Tensor:
    """4-bit codes [out, in], two to a byte: [out, in / 2]."""
    scale = tensor.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
    low, high = ((tensor.float() / scale).round() + 8).to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


ROUNDED = {"fp8": fp8, "int8": int8, "int4": int4, "codes": codes}


def _head(held: Mapping[str, Tensor], how: str, config: DraftConfig, parts: TargetParts | None) -> Tensor:
    own = held[_HEAD]
    if how == "permuted":
        return own[order(len(own))]
    if how == "embedding" and "embed_tokens.weight" in held:
        return held["embed_tokens.weight"][: len(own)].to(own.dtype)
    if how == "of first ids":
        ids = map_ids(held, config)
        inside = ids < len(own)
        made = torch.zeros_like(own)
        made[ids[inside]] = own[inside]
        return made
    if parts is None:
        raise ValueError("the target is not at hand")
    taken = {"target rows": lambda: parts.head[map_ids(held, config)], "target first": lambda: parts.head[: len(own)],
             "embedding": lambda: parts.embedding[: len(own)]}
    if how not in taken:
        raise ValueError(f"no head {how!r}")
    found = taken[how]()
    if found.shape != own.shape:
        raise ValueError("the target's head is of another width than the draft's")
    return found.to(own.dtype)


def _map(held: dict[str, Tensor], how: str, config: DraftConfig) -> None:
    size, vocab = config.draft_vocab_size, config.vocab_size
    if how == "without t2d":
        held.pop("t2d", None)
        return
    if how == "zero":
        held["d2t"] = torch.zeros_like(held["d2t"])
        return
    if how in ("longer", "shorter"):
        held["d2t"] = torch.cat([held["d2t"], held["d2t"][-1:]]) if how == "longer" else held["d2t"][:-1].clone()
        return
    if how in ("other", "first"):
        ids = torch.arange(size)
        if how == "other":
            ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[:size].sort().values
        held["d2t"] = ids - torch.arange(size)
        chosen = torch.zeros(vocab, dtype=torch.bool)
        chosen[ids] = True
        held["t2d"] = chosen
        return
    held["d2t"] = held["d2t"] + int(how)
