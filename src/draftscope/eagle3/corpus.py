"""Where training examples come from: held in memory, or read from files when a batch asks for them.

Only what a corpus says of all its examples (lengths, places) is held at once; a batch's states are loaded when it is made.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from draftscope.eagle3.choices import Choices
from draftscope.eagle3.examples import Example, Fitting, choices, fingerprint
from draftscope.eagle3.parallel import ALONE, Ranks
from draftscope.errors import DraftscopeError
from draftscope.states.folder import FileSource
from draftscope.states.types import Sample
from draftscope.target.norms import taken_after_norm


class Corpus(Protocol):
    """Examples by number.

    Attributes:
        lengths: tokens of each.
        shape: entries and width of their states; itemsize: bytes of a number of theirs.
    """

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def itemsize(self) -> int: ...

    def name(self, number: int) -> str: ...

    def mark(self, number: int) -> str:
        """Short text that changes with what one holds."""
        ...

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Token ids [T] int64 and answer mask [T] bool of one, without its states where that is cheaper."""
        ...

    def load(self, numbers: Sequence[int]) -> list[Example]: ...


@dataclass(slots=True)
class Held:
    """Examples in memory."""

    examples: Sequence[Example]

    @property
    def lengths(self) -> Sequence[int]:
        return [len(e) for e in self.examples]

    @property
    def shape(self) -> tuple[int, int]:
        states = self.examples[0].states
        return int(states.shape[1]), int(states.shape[2])

    @property
    def itemsize(self) -> int:
        return self.examples[0].states.itemsize

    def name(self, number: int) -> str:
        return self.examples[number].name

    def mark(self, number: int) -> str:
        example = self.examples[number]
        return fingerprint(example.token_ids, example.answer, example.states)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        return self.examples[number].token_ids, self.examples[number].answer

    def load(self, numbers: Sequence[int]) -> list[Example]:
        return [self.examples[i] for i in numbers]


@dataclass(slots=True)
class Part:
    """Some examples of a corpus."""

    whole: Corpus
    numbers: Sequence[int]

    @property
    def lengths(self) -> Sequence[int]:
        lengths = self.whole.lengths
        return [lengths[i] for i in self.numbers]

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape

    @property
    def itemsize(self) -> int:
        return self.whole.itemsize

    def name(self, number: int) -> str:
        return self.whole.name(self.numbers[number])

    def mark(self, number: int) -> str:
        return self.whole.mark(self.numbers[number])

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        return self.whole.tokens(self.numbers[number])

    def load(self, numbers: Sequence[int]) -> list[Example]:
        return self.whole.load([self.numbers[i] for i in numbers])


@dataclass(slots=True)
class _Place:
    """file: its place in the source; row: among the samples of that file that can be read."""

    file: int
    row: int
    length: int
    key: str


@dataclass
class FileCorpus:
    """Examples of files, opened again whenever a batch needs them.

    Attributes:
        normed: samples whose last state was stored after the final norm.
    """

    source: FileSource[Sample]
    fitting: Fitting
    store: Choices
    places: list[_Place] = field(default_factory=list)
    normed: int = 0
    shape: tuple[int, int] = (0, 0)
    itemsize: int = 4
    _open: tuple[int, list[Sample]] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, source: FileSource[Sample], fitting: Fitting, folder: Path, *, ranks: Ranks = ALONE,
           on_tokens: Callable[[int], None] | None = None) -> FileCorpus:
        """Go through the files once: lengths, and the target's choices where `folder` does not keep them yet.

        Several processes share the choices' work; each must call this.

        Raises:
            DraftscopeError: no file can be read, samples that do not fit, or a disk that refuses.
        """
        store, target = Choices(folder, ranks.rank), fitting.parts.fingerprint()
        corpus = cls(source, fitting, store)
        readable = seen = 0
        with store:
            for file in range(len(source.files)):
                for row, sample in enumerate(corpus._items(file)):
                    readable += 1
                    # What is known is not needed here, what is not is another process's turn or found below.
                    example = fitting.example(sample, best=torch.empty(0), normed=False)
                    if example is None:
                        continue
                    key = f"{sample.name}:{fingerprint(example.token_ids, example.answer, example.states, target)}"
                    if key not in store and seen % ranks.world == ranks.rank:
                        last = example.states[:, -1]
                        normed = bool(taken_after_norm(fitting.parts, last))
                        store.add(key, choices(fitting.parts, last, example.answer, normed=normed), normed)
                        if on_tokens is not None:
                            on_tokens(len(example))
                    corpus._enter(_Place(file, row, len(example), key), example)
                    seen += 1
        if not readable:
            first = source.skipped[0] if source.skipped else None
            why = "holds no sample" if first is None else f"none of {len(source.files)} files can be read; the first: {first.why}"
            raise DraftscopeError(why, where=str(source.path if first is None else first.path))
        ranks.barrier()
        store.reload()
        corpus.normed = sum(store.normed(place.key) for place in corpus.places)
        return corpus

    def _enter(self, place: _Place, example: Example) -> None:
        entries, width = example.states.shape[1:]
        if not self.places:
            self.shape, self.itemsize = (entries, width), example.states.itemsize
        elif self.shape != (entries, width):
            raise DraftscopeError(f"states hold {entries} entries of width {width}, those before it {self.shape[0]} of "
                                  f"{self.shape[1]}", where=example.name, remedy="Train on samples of one kind")
        self.places.append(place)

    @property
    def lengths(self) -> Sequence[int]:
        return [place.length for place in self.places]

    def name(self, number: int) -> str:
        place = self.places[number]
        return place.key.rpartition(":")[0]

    def mark(self, number: int) -> str:
        return self.places[number].key.rpartition(":")[2]

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        example = self._example(self.places[number])
        return example.token_ids, example.answer

    def load(self, numbers: Sequence[int]) -> list[Example]:
        return [self._example(self.places[i]) for i in numbers]

    def _example(self, place: _Place) -> Example:
        with self._lock:
            held = self._items(place.file, again=True)
            example = None
            if place.row < len(held):
                best, normed = self.store.read(place.key), self.store.normed(place.key)
                example = self.fitting.example(held[place.row], best=best, normed=normed)
            if example is None or len(example) != place.length:
                raise DraftscopeError("is no longer what it was when the run began", where=str(self.source.files[place.file]),
                                      remedy="Train into another folder")
            return example

    def _items(self, file: int, *, again: bool = False) -> list[Sample]:
        """The samples of a file; files of several stay open until the next is asked for."""
        if self._open is not None and self._open[0] == file:
            return self._open[1]
        self._open = None
        try:
            held = self.source.items(file)
        except DraftscopeError as error:
            if again or (self.source.files[file] == self.source.path and not self.source.skip_bad):
                raise
            self.source.skip(file, error)
            return []
        if len(held) > 1:
            self._open = (file, held)
        return held


def split(corpus: Corpus, every: int) -> tuple[Corpus, Corpus]:
    """Training and held-out examples: of every `every` the last is held out."""
    numbers = range(len(corpus.lengths))
    return (Part(corpus, [i for i in numbers if i % every != every - 1]), Part(corpus, numbers[every - 1 :: every]))


def identity(corpus: Corpus) -> str:
    """Short text that changes with the names or lengths of the examples."""
    found = 0
    for number, length in enumerate(corpus.lengths):
        found = zlib.crc32(repr((corpus.name(number), length)).encode(), found)
    return f"{found:08x}"


def contents(corpus: Corpus) -> str:
    """Short text that changes with what the examples hold."""
    found = 0
    for number in range(len(corpus.lengths)):
        found = zlib.crc32(corpus.mark(number).encode(), found)
    return f"{found:08x}"


def column_rms(corpus: Corpus, rows: int = 20000) -> Tensor:
    """Root mean square of every column of every slot [S, Ht] over answer rows; the first token, a sink, is left out."""
    lengths = corpus.lengths
    step = max(1, sum(lengths) // rows)
    numbers = range(0, len(lengths), step)
    total, seen = torch.zeros(()), 0
    for number in numbers:
        (example,) = corpus.load([number])
        picked = example.answer.clone()
        picked[0] = False
        values = example.states[picked][:, :-1].float().nan_to_num(0.0, 0.0, 0.0)
        total = total + values.square().sum(0)
        seen += len(values)
    return (total / max(seen, 1)).sqrt().clamp(min=1e-6)


def token_counts(corpus: Corpus, vocab: int) -> Tensor:
    """Occurrences of every token among answer tokens [V] int64."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for number in range(len(corpus.lengths)):
        token_ids, answer = corpus.tokens(number)
        counts += torch.bincount(token_ids[answer], minlength=vocab)[:vocab]  # an embedding may be padded beyond
    return counts
