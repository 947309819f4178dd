"""The checkpoint that a draft was made from: opened, and held against the draft before anything is measured."""

from __future__ import annotations

from draftscope.eagle3.checkpoint import Checkpoint, load_checkpoint
from draftscope.errors import DraftscopeError, UsageError
from draftscope.states.places import Place, model_folder

SIZES = {
    "hidden_size": "width", "target_hidden_size": "target's width", "vocab_size": "vocabulary", "slots": "slots",
    "layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "key heads", "intermediate_size": "inner width",
}
"""What no conversion or export changes, by the configuration's field."""
CUT = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
"""Tensors that an export may leave out rows of; others keep their shape, unless they are turned."""


def open_source_draft(source: Place | None, draft: Place | None, checkpoint: Checkpoint | None,
                      layers: int | None) -> Checkpoint | None:
    """None where none is given.

    Args:
        checkpoint: the draft, opened; None where it could not be.

    Raises:
        UsageError: no draft to compare it with, or the draft itself.
        DraftscopeError: cannot be read, or a draft of other sizes, which this one cannot have been made from.
    """
    if source is None:
        return None
    if draft is None:
        raise UsageError("--source-draft is compared with the draft that was made from it", remedy="Give that with --draft")
    folder = model_folder(source)
    if folder.resolve() == model_folder(draft).resolve():
        raise UsageError("is the draft itself", where=str(source), remedy="Name the checkpoint that it was made from")
    found = load_checkpoint(folder, target_layers=layers)
    if checkpoint is not None:
        unlike = [f"{words} {getattr(found.config, name)} and {getattr(checkpoint.config, name)}"
                  for name, words in SIZES.items() if getattr(found.config, name) != getattr(checkpoint.config, name)]
        unlike += [f"{name} {list(tensor.shape)} and {list(checkpoint.tensors[name].shape)}"
                   for name, tensor in found.tensors.items() if name in checkpoint.tensors and name not in CUT
                   and sorted(tensor.shape) != sorted(checkpoint.tensors[name].shape)][:3]
        if unlike:
            raise DraftscopeError(f"is of another shape than the draft ({', '.join(unlike)}): this one was not made from it",
                                  where=str(source), remedy="Name the checkpoint that --draft was converted or exported from")
    return found
