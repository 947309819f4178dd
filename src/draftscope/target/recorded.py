"""A sweep that an engine made: all boundaries of its target over given tokens, kept as plain data.

For targets that only an engine can run. A file holds `hidden_states` [T, n+1, Ht], boundary 0 to n, n before the final norm
(`draftscope capture vllm --sweep` writes them); what is asked for has to begin a recorded sequence, since states depend on what
came before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from draftscope.errors import DraftscopeError
from draftscope.states.opening import open_source
from draftscope.states.places import Place
from draftscope.states.types import Sample
from draftscope.target.parts import TargetParts
from draftscope.target.sweep import Swept


class RecordedSweep:
    """States of a target at every boundary, looked up instead of computed.

    Args:
        folder: of the recorded files.
        parts: of the same target: its width, its depth and its final norm.

    Raises:
        DraftscopeError: files of another target, or none.
    """

    def __init__(self, folder: Place, parts: TargetParts) -> None:
        self.folder, self.parts, self.layers, self.width = folder, parts, parts.layers, parts.width
        source = open_source(folder, kind="samples")
        held: list[tuple[list[int], Sample]] = []
        for item in source:
            if not isinstance(item, Sample):
                raise DraftscopeError("holds a capture, not a sweep", where=str(folder), remedy="Name what --sweep wrote")
            entries, width = item.states.shape[1:]
            if (entries, width) != (parts.layers + 1, parts.width):
                raise DraftscopeError(
                    f"has {entries} entries {width} wide, this target {parts.layers + 1} boundaries {parts.width} wide",
                    where=f"{folder}: {item.name}", remedy="A sweep holds every boundary, 0 to n, of the target that is given")
            held.append((item.token_ids.tolist(), item))
        if not held:
            raise DraftscopeError("holds no sequence", where=str(folder))
        held.sort(key=lambda pair: pair[0])
        self._tokens, self._samples = [tokens for tokens, _ in held], [sample for _, sample in held]

    def covered(self, token_ids: Tensor) -> int:
        """How many of the first tokens [T] are recorded."""
        return self._find(token_ids.tolist())[0]

    def _find(self, wanted: list[int]) -> tuple[int, Sample]:
        # Sorted by tokens, the longest shared beginning is a neighbour's.
        place = bisect_left(self._tokens, wanted)
        near = [i for i in (place - 1, place) if 0 <= i < len(self._tokens)]
        return max(((_shared(wanted, self._tokens[i]), self._samples[i]) for i in near), key=lambda pair: pair[0])

    def sweep(self, items: Iterable[tuple[str, Tensor]], *, on_tokens: Callable[[int], None] | None = None) -> Iterator[Swept]:
        """All states of named token sequences, as `target.sweep.sweep` yields them, without partial sums.

        Raises:
            DraftscopeError: tokens that are not recorded to their end.
        """
        for name, ids in items:
            count, sample = self._find(ids.tolist())
            if count < len(ids):
                raise DraftscopeError(f"holds {count} of the {len(ids)} tokens of {name}", where=str(self.folder),
                                      remedy="Sweep the tokens of this capture")
            stream = sample.states[:count].transpose(0, 1).float()
            post = self.parts.final_norm(stream[-1]) if count else torch.empty(0, self.width)
            yield Swept(name, ids, stream, post, None)
            if on_tokens is not None:
                on_tokens(count)


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
