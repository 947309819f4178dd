"""A healthy set-up, and what the maker of a fault changes in it: at the place where the real fault acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from draftscope.eagle3.reading import Reading
from draftscope.faults.rewriting import Rewritten
from draftscope.target.quantised import Precision
from draftscope.target.spoiling import Spoiler
from draftscope.target.wiring import Wiring

Reported = Literal["counts", "simulated", "bonus left out", "conditional as joint"]


@dataclass(frozen=True, slots=True)
class Plant:
    """How a pair is trained and served.

    Attributes:
        serve, train: which target states the engine, and the writer of the training data, put into the slots.
        last: what befalls the last state on its way into the training files.
        precision: of the weights of the target that serves, "" = as they are.
        engine: how the engine reads the checkpoint.
        drop: name prefixes of tensors that the checkpoint file lacks.
        poison: a tensor of the checkpoint file with one value that is not finite.
        embedding: what the exporter put beside the draft: nothing, or an embedding whose rows belong to other tokens.
        config: keys of its config.json that say something else than it was trained with.
        stored_map: how the exporter wrote `d2t`.
        loss_mask: `empty` when the assistant marker was never found.
        training_sequences: the draft trained anew, on so few sequences; None = the pair's own draft.
        reported: how acceptance is told beside the capture: the engine's counts, a log of an engine that simulates it, or figures
            that count something else.
        rewritten: what the writers of either side's files do to the layout of what they are given.
        train_ranks: the data writer's data-parallel ranks, which take turns, where they do not agree; () = all are as `train`.
        labels: the names that the writer of the training data gives its entries; () = boundaries, truthfully.
    """

    serve: Wiring
    train: Wiring
    last: tuple[Spoiler, ...] = ()
    precision: Precision | Literal[""] = ""
    engine: Reading = field(default_factory=Reading)
    drop: tuple[str, ...] = ()
    poison: str = ""
    embedding: Literal["", "of other tokens"] = ""
    config: tuple[tuple[str, bool], ...] = ()
    stored_map: Literal["offset", "absolute"] = "offset"
    loss_mask: Literal["kept", "empty"] = "kept"
    training_sequences: int | None = None
    rewritten: Rewritten = field(default_factory=Rewritten)
    train_ranks: tuple[Wiring, ...] = ()
    labels: tuple[str, ...] = ()
    reported: Reported = "counts"

    @classmethod
    def healthy(cls, boundaries: tuple[int, ...]) -> Plant:
        return cls(serve=Wiring.of(boundaries), train=Wiring.of(boundaries))
