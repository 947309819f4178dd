"""Rows of an Arrow data set as the `datasets` library saves it: token ids and loss masks by row number.

pyarrow is an optional extra; it maps the files, so rows are read when they are asked for.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.errors import StatesError
from draftscope.states.places import Place, local_copy, matching
from draftscope.states.tensorfile import read_json

STATE = "state.json"


def data_set_of(folder: Place) -> Place | None:
    """The data set in a folder or in the one above it; None if neither is one."""
    for place in (folder, folder.parent):
        if (place / STATE).is_file() and matching(place, ".arrow"):
            return place
    return None


class ArrowRows:
    """Columns of integer lists of a saved data set.

    Args:
        folder: where `state.json` and the `.arrow` files lie.

    Raises:
        DraftscopeError: pyarrow is absent.
        StatesError: no such data set, one whose description names files elsewhere, or Arrow files that are cut or contradict
            themselves.
    """

    def __init__(self, folder: Place) -> None:
        try:
            import pyarrow
        except ImportError:
            raise DraftscopeError("is an Arrow data set, and pyarrow is not installed", where=str(folder),
                                  remedy="pip install 'draftscope[arrow]', or read the states alone: --format plain") from None
        self._pyarrow = pyarrow
        self.folder = folder
        self._tables: list[Any] = []
        self._starts: list[int] = []
        self.rows = 0
        for name in _names(folder):
            table = self._open(folder / name)
            self._starts.append(self.rows)
            self._tables.append(table)
            self.rows += table.num_rows
        held = self._tables[0].column_names
        self.columns = frozenset(name for name in held if all(name in table.column_names for table in self._tables))

    def _open(self, path: Place) -> Any:
        arrow = self._pyarrow
        try:
            with local_copy(path) as copied:
                table = arrow.ipc.open_stream(arrow.memory_map(str(copied))).read_all()
            table.validate()
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise StatesError(f"is no whole Arrow file ({_line(error)})", cause="broken", where=str(path),
                              remedy="Save the data set again") from None
        return table

    def integers(self, column: str, row: int) -> Tensor:
        """One list [T] int64 (bool becomes 0 and 1).

        Raises:
            StatesError: no such column or row, or no list of integers.
        """
        arrow = self._pyarrow
        where = f"{self.folder}, row {row}, column {column}"
        if column not in self.columns:
            raise StatesError(f"has no column `{column}` (it has {', '.join(sorted(self.columns)[:8])})", where=str(self.folder))
        if not 0 <= row < self.rows:
            raise StatesError(f"has {self.rows} rows, none with number {row}", cause="rows", where=str(self.folder))
        table = max(i for i, start in enumerate(self._starts) if start <= row)
        try:
            cell = self._tables[table].column(column).slice(row - self._starts[table], 1).combine_chunks()
            cell.validate(full=True)
            values = cell.flatten()
            if arrow.types.is_boolean(values.type):
                values = values.cast(arrow.uint8())
            if cell.null_count or values.null_count or not arrow.types.is_integer(values.type):
                raise StatesError(f"is {cell.type} where a list of integers is expected", where=where)
            return torch.from_numpy(values.to_numpy(zero_copy_only=False).astype("int64"))
        except (arrow.ArrowException, ValueError, TypeError, AttributeError) as error:
            raise StatesError(f"cannot be read ({_line(error)})", cause="broken", where=where) from None


def _names(folder: Place) -> list[str]:
    held = read_json(folder / STATE)
    described: dict[str, Any] = held if isinstance(held, dict) else {}
    files = described.get("_data_files")
    named = [entry.get("filename") for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []
    names = [name for name in named if isinstance(name, str)]
    if not names or len(names) != len(named):
        raise StatesError("names no data files", where=str(folder / STATE), remedy="Save the data set with save_to_disk")
    for name in names:
        if name != PurePosixPath(name).name or name in (".", ".."):
            raise StatesError(f"names `{name[:80]}`, which is no file in this folder", cause="broken", where=str(folder / STATE))
    if described.get("_indices_data_files"):
        raise StatesError("selects rows through an index file, which is not read", where=str(folder / STATE),
                          remedy="Save it again after flatten_indices()")
    return names


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
