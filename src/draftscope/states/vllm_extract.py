"""What vLLM's method `extract_hidden_states` leaves: `{request}.safetensors` with `hidden_states` [T, L, H] and `token_ids` [T].

`ExampleHiddenStatesConnector` (`vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py`, 0.32 and
0.33) writes the layers asked for, in the order of the ids, the one of the last layer before the final norm; the answer's tokens
only with `include_output_tokens`, the last of them never. By shape such a file is plain training data, and read as such it
means the same. It is taken for a capture where its `.lock` lies beside it (only a server leaves one), where a capture is asked
for, or where the format is named: then all layers but the last are the slots. `vllm-extract@all` makes slots of every layer.
"""

from __future__ import annotations

import torch

from draftscope.errors import UsageError
from draftscope.states import plain
from draftscope.states.folder import LOCK, FileSource, list_files
from draftscope.states.places import Place
from draftscope.states.scales import rescaled
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Trace

NAME = "vllm-extract"
SUFFIX = ".safetensors"
KIND = "traces"
DEEP = False
OVER = frozenset({plain.NAME})
ALL = "all"


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    why = plain.fits(file)
    return None if why is None or TensorFile(file).has("loss_mask") else f"{why} and no mask"


def claims(file: Place) -> bool:
    """Whether a file that fits is taken for a capture unasked."""
    return file.with_name(file.name + LOCK).exists()


def open(path: Place, chosen: str | None = None, choice: str = "") -> FileSource[Trace]:
    """Requests of a folder or of one file, lazily.

    Args:
        choice: `all` = every layer is a slot, and there is no last state.

    Raises:
        UsageError: another choice.
        DraftscopeError: nothing there.
    """
    if choice not in ("", ALL):
        raise UsageError(f"no reading `{NAME}@{choice}`", remedy=f"Known: {NAME}, {NAME}@{ALL}")
    files, others = list_files(path, SUFFIX)
    return FileSource(kind="traces", path=path, format=NAME, chosen=chosen, files=files, others=others, meta={"engine": "vllm"},
                      read=lambda file, said: read_trace(file, said, last=choice != ALL))


def read_trace(file: Place, notes: list[str], *, last: bool = True) -> Trace:
    """One request: every row accepted, prompt and answer not told apart.

    Raises:
        DraftscopeError: names, ranks, dtypes or numbers of rows that do not fit, named with file and tensor.
    """
    opened = TensorFile(file)
    opened.require("hidden_states", "token_ids")
    states = rescaled(opened, opened.floats("hidden_states", 3, "[tokens, layers, width]"), notes)
    token_ids = opened.integers("token_ids", 1, "[tokens]").to(torch.int64)
    opened.fit("token_ids", len(token_ids), len(states), "hidden_states")
    layers = states.shape[1]
    last = last and layers > 1
    slots = states[:, :-1] if last else states
    taken = f"{layers - 1} slots, the last layer as the last state" if last else "all as slots"
    notes.append(f"{layers} layers a row: {taken}")
    accepted = torch.ones(len(states), dtype=torch.bool)
    return Trace(name=file.name, fc_input=slots.flatten(1), token_ids=token_ids, accepted=accepted,
                 last_hidden=states[:, -1] if last else None, meta={"engine": "vllm", "format": NAME})
