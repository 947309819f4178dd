"""A draft vocabulary that was made elsewhere: read from a file, held against the target and the data.

Files of SafeAILab and SpecForge ({d2t, t2d}, of `torch.save`), of speculators (`d2t.npy`, with `t2d.npy` beside it or not),
safetensors, a draft checkpoint. d2t holds offsets: target id = i + d2t[i].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draftscope.eagle3.weightfiles import read_weights
from draftscope.errors import DraftscopeError
from draftscope.states.tensorfile import TensorFile
from draftscope.states.torchfile import TORCH_FILES, load_tensors

LEAST_OF_BEST = 0.5
"""A map that covers less than this of what the best map of its size covers was not made for these tokens."""
_FORMS = "A map is {d2t, t2d} of torch.save, safetensors or .npy with d2t, or a draft checkpoint"


def read_map(path: Path, vocab: int) -> Tensor:
    """d2t [D] int64 of a file.

    Args:
        vocab: tokens of the target.

    Raises:
        DraftscopeError: no map there, ids outside the target's vocabulary or not ascending, or a t2d that says otherwise.
    """
    held = _read(path)
    if "d2t" not in held:
        raise DraftscopeError("holds no d2t", where=str(path), remedy=_FORMS)
    d2t = held["d2t"]
    if d2t.dim() != 1 or not len(d2t) or d2t.is_floating_point():
        raise DraftscopeError(f"d2t is {d2t.dtype} of shape {list(d2t.shape)}, not whole numbers [D]", where=str(path))
    d2t = d2t.long()
    ids = torch.arange(len(d2t)) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise DraftscopeError(f"names target ids {int(ids.min())}..{int(ids.max())}, the target knows 0..{vocab - 1}",
                              where=str(path), remedy="It was made for another tokenizer, or holds ids where offsets belong")
    if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise DraftscopeError("its target ids do not ascend, as engines and trainers take them", where=str(path),
                              remedy="Sort the chosen ids and write d2t[i] = id - i")
    if "t2d" in held:
        t2d = held["t2d"].flatten()
        if len(t2d) != vocab:
            raise DraftscopeError(f"t2d is for a vocabulary of {len(t2d)}, the target's is {vocab}", where=str(path),
                                  remedy="It was made for another tokenizer")
        if not torch.equal(t2d.bool().nonzero().squeeze(-1), ids):
            raise DraftscopeError("t2d and d2t name different tokens", where=str(path), remedy="Make both from one list of ids")
    return d2t


def coverage(d2t: Tensor, counts: Tensor, where: str) -> float:
    """Share of the data's answer tokens that the map covers.

    Raises:
        DraftscopeError: far less than a map of its size can cover.
    """
    ids = torch.arange(len(d2t)) + d2t
    total = max(float(counts.sum()), 1.0)
    share, best = float(counts[ids].sum()) / total, float(counts.topk(len(ids)).values.sum()) / total
    if share < LEAST_OF_BEST * best:
        raise DraftscopeError(f"covers {share:.1%} of the data's answer tokens, the {len(ids)} most frequent of them {best:.1%}",
                              where=where, remedy="It was made for another tokenizer or other text: leave --vocab-map out")
    return share


def _read(path: Path) -> Mapping[str, Tensor]:
    if path.is_dir():
        return read_weights(path).tensors
    if not path.is_file():
        raise DraftscopeError("does not exist", where=str(path))
    if path.suffix == ".npy":
        found = {"d2t": _array(path)}
        beside = path.with_name(path.name.replace("d2t", "t2d"))
        return found | ({"t2d": _array(beside)} if beside != path and beside.is_file() else {})
    if path.name.endswith(TORCH_FILES):
        held = load_tensors(path)
        return {k: v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, dict) else {}
    if path.suffix == ".safetensors":
        opened = TensorFile(path)
        return {name: opened.tensor(name) for name in ("d2t", "t2d") if opened.has(name)}
    raise DraftscopeError("is no file that holds a vocabulary map", where=str(path), remedy=_FORMS)


def _array(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (OSError, ValueError, TypeError) as error:
        raise DraftscopeError(f"cannot be read as an array ({error})", where=str(path)) from None
