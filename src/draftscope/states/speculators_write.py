"""speculators' training data written: an Arrow data set as `datasets` saves it, and `hs_{i}.safetensors` for each of its rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from draftscope.errors import DraftscopeError
from draftscope.states.plain import OTHER, UNKNOWN
from draftscope.states.speculators import FOLDER
from draftscope.states.tensorfile import save_tensors
from draftscope.states.types import Sample

ROWS_A_BATCH = 1024
NAME = "data-00000-of-00001.arrow"
VALUE = {"dtype": "int64", "_type": "Value"}
FEATURES = {"input_ids": {"feature": VALUE, "_type": "List"}, "loss_mask": {"feature": VALUE, "_type": "List"}, "seq_len": VALUE}


class DataSetWriter:
    """Samples as rows 0, 1, ... with their states beside them.

    Args:
        folder: where the data set goes; must exist.

    Raises:
        DraftscopeError: pyarrow is absent, or the disk refuses.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import pyarrow
        except ImportError:
            raise DraftscopeError("speculators' data set is an Arrow file, and pyarrow is not installed", where=str(folder),
                                  remedy="pip install 'draftscope[arrow]'") from None
        self._pyarrow, self.folder = pyarrow, folder
        listed = pyarrow.list_(pyarrow.int64())
        schema = pyarrow.schema([("input_ids", listed), ("loss_mask", listed), ("seq_len", pyarrow.int64())])
        self._schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})
        self._sink = pyarrow.OSFile(str(folder / NAME), "wb")
        self._writer = pyarrow.ipc.new_stream(self._sink, self._schema)
        self._rows: list[tuple[list[int], list[int]]] = []
        self.rows = 0

    def add(self, sample: Sample) -> None:
        """Write one sample; the input line it came from and an unknown mask are kept in the file's metadata."""
        mask = torch.ones(len(sample.token_ids), dtype=torch.bool) if sample.loss_mask is None else sample.loss_mask
        said: dict[str, Any] = {"index": str(sample.index)}
        if sample.labels:
            said["labels"] = list(sample.labels)
        if sample.loss_mask is None:
            said["loss_mask"] = UNKNOWN
        if sample.claimed_norm != "pre":
            said["last_norm"] = sample.claimed_norm or UNKNOWN
        tensors = {"hidden_states": sample.states, "token_ids": sample.token_ids.to(torch.int64), OTHER: sample.other_last}
        save_tensors(self.folder / FOLDER / f"hs_{self.rows}.safetensors", tensors, said)
        self._rows.append((sample.token_ids.tolist(), mask.long().tolist()))
        self.rows += 1
        if len(self._rows) == ROWS_A_BATCH:
            self._flush()

    def _flush(self) -> None:
        arrow = self._pyarrow
        ids, masks = [row[0] for row in self._rows], [row[1] for row in self._rows]
        columns = [arrow.array(ids, self._schema.field(0).type), arrow.array(masks, self._schema.field(1).type),
                   arrow.array([len(row) for row in ids], arrow.int64())]
        self._writer.write_batch(arrow.record_batch(columns, schema=self._schema))
        self._rows = []

    def close(self) -> None:
        """Finish the data set with the descriptions that `datasets` looks for."""
        if self._rows:
            self._flush()
        self._writer.close()
        self._sink.close()
        state: dict[str, Any] = {
            "_data_files": [{"filename": NAME}], "_fingerprint": os.urandom(8).hex(), "_format_columns": None,
            "_format_kwargs": {}, "_format_type": "torch", "_output_all_columns": False, "_split": None,
        }
        (self.folder / "state.json").write_text(json.dumps(state))
        info = {"citation": "", "description": "", "features": FEATURES, "homepage": "", "license": ""}
        (self.folder / "dataset_info.json").write_text(json.dumps(info))
