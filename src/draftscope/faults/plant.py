"""A healthy set-up, and what the maker of a fault changes in it: at the place where the real fault acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from draftscope.eagle3.reading import Reading
from draftscope.eagle3.sampling import Sampling
from draftscope.faults.rewriting import Rewritten
from draftscope.faults.writing import LossMask as LossMask
from draftscope.faults.writing import Texts
from draftscope.target.quantised import Precision
from draftscope.target.spoiling import Spoiler
from draftscope.target.wiring import Wiring

Reported = Literal["counts", "simulated", "bonus left out", "conditional as joint"]
Training = Literal["", "optimizer state lost", "next state seen"]
Dump = Literal["", "written twice", "part missing", "other order", "of other conversations"]

Build = Literal["", "fc_norm", "norm_before_fc", "fc_bias", "two layers"]


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
        embedding: what the exporter put beside the draft: nothing, an embedding whose rows belong to other tokens, the one
            that it was trained with (another basis than the target's), or that of the rotated target.
        config: keys of its config.json that say something else than it was trained with.
        export: what the exporter did to its tensors, as `eagle3.altered` names it.
        draft: a draft of another build: with norms or a bias before `fc`, with gains that the trained states have; with a second
            layer that adds little.
        state: which state of training was exported: the trained one, the one before the first step, or one after few sequences.
        refused: no engine starts with this checkpoint: what was captured is of the one before it.
        source: the checkpoint that it was exported from is at hand.
        mode: the algorithm that the server was started with: in EAGLE's the draft receives the target's last state alone.
        stored_map: how the exporter wrote `d2t`.
        loss_mask: what the data writer marks as answers.
        texts: how conversations and prompts are rendered, and who wrote the answers.
        training: what becomes of a run that trains the draft anew, whose log is handed over.
        dump: what becomes of the folder of training data; with the conversations it was made from handed over.
        heldout: a folder of held-out samples: none, other conversations, or some of those trained on.
        part: of so many samples one has an empty mask, is written twice, is missing or is held out, where some are.
        by: tokens by which a mask is early or late, where it is.
        theta: the base of the draft's own rotary table.
        training_sequences: the draft trained anew, on so few sequences; None = the pair's own draft.
        reported: how acceptance is told beside the capture: the engine's counts, a log of an engine that simulates it, or figures
            that count something else.
        rewritten: what the writers of either side's files do to the layout of what they are given.
        train_ranks: the data writer's data-parallel ranks, which take turns, where they do not agree; () = all are as `train`.
        sampling: how the engine draws tokens; None = greedily.
        labels: the names that the writer of the training data gives its entries; () = boundaries, truthfully.
    """

    serve: Wiring
    train: Wiring
    last: tuple[Spoiler, ...] = ()
    precision: Precision | Literal[""] = ""
    engine: Reading = field(default_factory=Reading)
    drop: tuple[str, ...] = ()
    poison: str = ""
    embedding: Literal["", "of other tokens", "trained", "rotated"] = ""
    config: tuple[tuple[str, Any], ...] = ()
    export: tuple[str, ...] = ()
    draft: Build = ""
    state: Literal["trained", "step 0", "early"] = "trained"
    refused: bool = False
    source: bool = False
    mode: Literal["eagle3", "eagle"] = "eagle3"
    stored_map: Literal["offset", "absolute"] = "offset"
    loss_mask: LossMask = "kept"
    training_sequences: int | None = None
    rewritten: Rewritten = field(default_factory=Rewritten)
    train_ranks: tuple[Wiring, ...] = ()
    sampling: Sampling | None = None
    labels: tuple[str, ...] = ()
    reported: Reported = "counts"
    texts: Texts = field(default_factory=Texts)
    training: Training = ""
    dump: Dump = ""
    heldout: Literal["", "of training"] = ""
    part: int = 3
    by: int = 1
    theta: float = 1e4

    @classmethod
    def healthy(cls, boundaries: tuple[int, ...], theta: float = 1e4) -> Plant:
        return cls(serve=Wiring.of(boundaries), train=Wiring.of(boundaries), theta=theta)
