"""A target's config.json held against the headers of its files, before anything of the sizes it names is allocated.

A config names sizes, and transformers allocates what it names: layers, experts, tables. The headers of safetensors are bounded
by the files themselves, so no true size exceeds the largest dimension in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from draftscope.errors import DraftscopeError
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile
from draftscope.text import visible

MOST_LAYERS, MOST_WIDTH = 10_000, 2**20
LEAST_CAP = 4096
"""Counts below it are let pass whatever the files hold: a module each takes no room."""
SLACK = 1.1
FEW = 2**16
"""Values that are no matter."""
PACKED = 20
"""How many values one stored value may stand for in a quantised file."""
_SIZE = re.compile(r"size|dim|rank|head|layer|expert|group|channel|width|depth|num_|^n_")
_FREE = re.compile(r"position|token|theta|window|length|context|chunk|seed|max_|period|_id$|_ids$")
"""Keys that size what is allocated at loading; and those whose numbers do not: positions, ids, windows."""
BELONGS = "The config and the weights belong to different models: take both from the same target"
Shapes = dict[str, tuple[int, ...]]


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Types and ranges of what is read of a text config.

    Raises:
        DraftscopeError: a value that no model has.
    """
    for key, most in (("hidden_size", MOST_WIDTH), ("num_hidden_layers", MOST_LAYERS), ("vocab_size", 2**31)):
        value = config.get(key)
        if value is not None and (type(value) is not int or not 0 < value <= most):
            raise _no(key, value, f"a whole number from 1 to {most:,}", where)
    for key in ("rms_norm_eps", "final_logit_softcapping", "embedding_multiplier", "logits_scaling"):
        value = config.get(key)
        if value is not None and not (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
        ):
            raise _no(key, value, "a number above 0", where)
    if not isinstance(config.get("model_type", ""), str):
        raise _no("model_type", config["model_type"], "a name", where)
    if not isinstance(config.get("tie_word_embeddings", False), (bool, type(None))):
        raise _no("tie_word_embeddings", config["tie_word_embeddings"], "true or false", where)
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if "/" in str(config.get(key) or ""):
            raise DraftscopeError(f"{key} names code to fetch ({visible(config[key], 80)})", where=where,
                                  remedy=f"Remove {key} from config.json: code of others is not run")


def read_shapes(files: Mapping[str, Place]) -> Shapes:
    """Shapes by tensor name from the headers of the files that are there.

    Raises:
        DraftscopeError: a file that is not whole.
    """
    shapes: Shapes = {}
    for file in dict.fromkeys(files.values()):
        if file.is_file():
            opened = TensorFile(file)
            shapes |= {name: opened.shape(name) for name in opened.names if files.get(name) == file}
    return shapes


def check_sizes(raw: Mapping[str, Any], config: Mapping[str, Any], shapes: Shapes, prefix: str, folder: Path) -> None:
    """Sizes that a config names against those in the headers.

    Args:
        raw: config.json as it stands; config: its text config, flat.
        prefix: of the text model's tensors, before `layers.` and `embed_tokens.`.

    Raises:
        DraftscopeError: they contradict each other, key and tensor named.
    """
    where = str(folder / "config.json")
    embedding = shapes.get(f"{prefix}embed_tokens.weight")
    vocab = config.get("vocab_size")
    if embedding is not None and vocab is not None and vocab != embedding[0]:
        raise DraftscopeError(f"vocab_size is {vocab:,}, but {prefix}embed_tokens.weight has {embedding[0]:,} rows", where=where,
                              remedy=BELONGS)
    check_depth(config, shapes, prefix, where)
    cap = max([LEAST_CAP, len(shapes), *(size for shape in shapes.values() for size in shape)])
    for path, value in _numbers(raw):
        key = path.rsplit(".", 1)[-1]
        if _SIZE.search(key) and not _FREE.search(key) and key != "vocab_size" and abs(value) > cap:
            raise DraftscopeError(f"{visible(path, 80)} is {value:,}, but no tensor of its files has a dimension above {cap:,}",
                                  where=where, remedy=BELONGS)


def check_depth(config: Mapping[str, Any], names: Mapping[str, object], prefix: str, where: str) -> None:
    """Layers that a config names against those whose tensors are there (those that predict further tokens come after them)."""
    start = f"{prefix}layers."
    held = {int(number) for name in names if name.startswith(start)
            and (number := name[len(start) :].split(".", 1)[0]).isdecimal() and len(number) < 6}
    layers = config["num_hidden_layers"]
    further = config.get("num_nextn_predict_layers") or 0
    if held and not layers <= len(held) <= layers + (further if isinstance(further, int) else 0):
        raise DraftscopeError(f"num_hidden_layers is {layers:,}, but the files hold {len(held):,} layers", where=where,
                              remedy=BELONGS)


def check_model(model: Any, shapes: Shapes, folder: Path, *, quantised: bool) -> None:
    """A model without memory, as the config describes it, against the headers.

    Raises:
        DraftscopeError: a tensor of another shape, or more values in all than the files hold.
    """
    where = str(folder / "config.json")
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if not quantised:
        for name, shape in wanted.items():
            stored = shapes.get(name, shape)
            if stored != shape:
                raise DraftscopeError(f"asks for {name} of shape {list(shape)}, the files hold {list(stored)}", where=where,
                                      remedy=BELONGS)
    shared = getattr(model, "all_tied_weights_keys", None) or {}
    asked = sum(math.prod(shape) for name, shape in wanted.items() if name not in shared)
    held = sum(math.prod(shape) for shape in shapes.values())
    if asked > held * (PACKED if quantised else SLACK) + FEW:
        raise DraftscopeError(f"describes a target of {asked:,} values, the files hold {held:,}", where=where, remedy=BELONGS)


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Whole numbers anywhere in a config, with their paths."""
    stack = [(path, value)]
    while stack:
        path, value = stack.pop()
        if type(value) is int:
            yield path, value
        elif isinstance(value, dict):
            stack += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(path, inner) for inner in value]


def _no(key: str, value: object, wanted: str, where: str) -> DraftscopeError:
    return DraftscopeError(f"{key} is {visible(value, 60)}, not {wanted}", where=where,
                           remedy="Take config.json from the target itself")
