"""speculators today (0.5 and later): an Arrow data set, and `hs_{i}.safetensors` with the states of its row i.

The rows have `input_ids` and `loss_mask`; the files, in `hidden_states/` of the data set unless another folder is named, have
`hidden_states` [T, L, H] and `token_ids` [T], in eight bits with `hidden_states_scales`. A file whose ids are not those of its
row is dropped by the trainer (`ArrowDataset._get_raw_data` in `train/data.py`, 0.9.0), and passed over here.
"""

from __future__ import annotations

import torch

from draftscope.states import plain
from draftscope.states.arrow import ArrowRows, data_set_of
from draftscope.states.errors import StatesError
from draftscope.states.folder import FileSource, list_files, number_of
from draftscope.states.places import Place
from draftscope.states.tensorfile import TensorFile
from draftscope.states.types import Sample

NAME = "speculators"
SUFFIX = ".safetensors"
KIND = "samples"
DEEP = False
OVER = frozenset({plain.NAME})
FOLDER = "hidden_states"


def files_of(path: Place) -> Place:
    """Where the states of a data set lie."""
    inner = path / FOLDER
    return inner if path.is_dir() and data_set_of(path) == path and inner.is_dir() else path


def fits(file: Place) -> str | None:
    """Why a file is of this format; None if it is not."""
    why = plain.fits(file)
    data_set = None if why is None else data_set_of(file.parent)
    return None if data_set is None else f"{why}, in an Arrow data set ({data_set}) whose rows hold the masks"


def open(path: Place, chosen: str | None = None) -> FileSource[Sample]:
    """Samples of a data set, of its folder of states, or of one file, lazily, by row.

    Raises:
        DraftscopeError: nothing there, no data set beside it, or no pyarrow to read that with.
    """
    folder = files_of(path)
    data_set = data_set_of(folder.parent if folder.is_file() else folder)
    if data_set is None:
        raise StatesError("has no Arrow data set in or above its folder", cause="foreign", where=str(path),
                          remedy="Name the data set, or read the states alone with --format plain")
    rows = ArrowRows(data_set)
    files, others = list_files(folder, SUFFIX)
    others = [skip for skip in others if not skip.path.endswith(".arrow")]
    notes = []
    known = {number_of(file) for file in files}
    absent = sum(row not in known for row in range(rows.rows))
    if absent and not path.is_file():
        notes.append(f"{absent} of {rows.rows} rows of the data set have no states (by default the trainer has vLLM make them)")
    return FileSource(kind="samples", path=path, format=NAME, chosen=chosen, files=files, others=others,
                      meta={"rows": rows.rows, "columns": sorted(rows.columns)}, numbered=True, notes=notes,
                      read=lambda file, said: read_sample(file, said, rows))


def read_sample(file: Place, notes: list[str], rows: ArrowRows) -> Sample:
    """The sample of a file with the mask of its row.

    Raises:
        DraftscopeError: a file or row that does not fit, or token ids that differ between the two.
    """
    sample = plain.read_sample(file, notes)
    if sample.index < 0:
        raise StatesError("has no number in its name, which names its row", where=str(file))
    ids = rows.integers("input_ids", sample.index)
    if not torch.equal(ids, sample.token_ids):
        at = min(len(ids), len(sample.token_ids))
        unlike = (ids[:at] != sample.token_ids[:at]).nonzero()
        first = int(unlike[0]) if len(unlike) else at
        lengths = f"{len(sample.token_ids)} and {len(ids)} tokens"
        what = f"its ids differ from row {sample.index} of the data set at token {first} ({lengths}): the trainer drops it"
        raise StatesError(what, cause="rows", where=f"{file}, tensor token_ids", remedy="--format plain reads it without the row")
    mask = rows.integers("loss_mask", sample.index)
    if len(mask) != len(ids):
        raise StatesError(f"has {len(mask)} values for {len(ids)} tokens", cause="rows",
                          where=f"{rows.folder}, row {sample.index}, column loss_mask")
    stored = TensorFile(file)
    if sample.loss_mask is not None and not torch.equal(sample.loss_mask, mask != 0):
        notes.append("the files hold other loss masks than the data set: those of the data set are taken, as the trainer does")
    sample.loss_mask = None if stored.metadata.get("loss_mask") == plain.UNKNOWN else mask != 0
    index = stored.metadata.get("index", "")
    if index.removeprefix("-").isdecimal() and len(index) < 20:
        sample.index = int(index)
    return sample
