"""Two sources side by side, without pairing tokens: norms, profiles over dimensions, and which slot could be which entry.

Statistics of different texts differ even where everything is right, and neighbouring boundaries have nearly the same ones. So
what comes out is a candidate, never proof of a displacement by one; `diagnose` with the target proves.

The distance of two entries is that of `compare.distances`, over ordinary rows. It is told in units of what the reference varies
by between its own natural groups (`compare.yardstick`); beside it stands the distance between the two halves of the source's own
sequences (`split_half`), what sampling alone makes of it, which is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from draftscope.compare.assignment import assign
from draftscope.compare.carriers import Carried, Dimension, Sinks, carriers, sinks
from draftscope.compare.distances import Distance, Model, distance
from draftscope.compare.effects import Effect, Mix, effects
from draftscope.compare.series import Series, series
from draftscope.compare.unpaired import UNTOLD, Coupling, Look, between, couplings, looks
from draftscope.compare.yardstick import Yardstick, yardsticks
from draftscope.errors import DraftscopeError
from draftscope.scan.fingerprint import CLASSES, ORDINARY, Fingerprint, RowClass, Statistics, is_fingerprint, load_fingerprint
from draftscope.scan.scan import scan
from draftscope.scan.served import is_statistics, load_statistics
from draftscope.showing import Shown
from draftscope.states.opening import open_source
from draftscope.states.places import Place, place
from draftscope.states.types import Source

FEW_ROWS = 50
"""Below this many answer rows on either side, all ordinary rows are compared."""

CANDIDATE = (
    "a candidate from statistics alone: neighbouring boundaries look alike, so a displacement by one is neither proven nor "
    "excluded"
)


class Figures(Model):
    """One entry, one class of rows."""

    rows: int
    nonfinite_rows: int
    zero_rows: int
    norm_mean: float | None
    norm_median: float | None
    norm_p01: float | None
    norm_p99: float | None
    norm_min: float | None
    norm_max: float | None
    mean_size: float | None = Field(description="L2 norm of the mean over rows")
    std_size: float | None = Field(description="L2 norm of the standard deviations over dimensions")
    outlier_channels: list[int] = Field(description="most frequent first, at most eight")


class Entry(Model):
    """One entry of a side; `classes` has the keys first, sink, answer, other and, of answer and other together, ordinary."""

    entry: int
    label: str
    last: bool
    classes: dict[str, Figures]


class Side(Model):
    """One of the two sources."""

    paths: list[str]
    kinds: list[str]
    sequences: int
    rows: int
    width: int
    dtypes: list[str]
    notes: list[str]
    entries: list[Entry]


class Candidate(Model):
    """What entry of A a slot of B could be.

    Attributes:
        entry, label: by the assignment; None without distances. `nearest` may repeat.
        distance, second: to the entry, and to the nearest other one.
        margin: how much worse the best other assignment is (1 - least total / least total without this pair).
        split_half: the larger distance between the halves of either of the two.
        clear: `second` exceeds `distance` by more than `split_half`.
        by_shape: the entry that the scale-free distance prefers.
    """

    slot: int
    slot_label: str
    entry: int | None
    label: str | None
    nearest: int | None
    distance: float | None
    second: float | None
    margin: float | None
    split_half: float | None
    clear: bool
    by_shape: int | None
    says: str


class Comparison(Model, Shown):
    """Two sources held against each other (`draftscope.compare/1`). A is the reference, as a rule the training states."""

    schema_: Literal["draftscope.compare/1"] = Field("draftscope.compare/1", alias="schema")
    a: Side
    b: Side
    rows_compared: Literal["answer", "ordinary"]
    distances: list[list[Distance]] = Field(description="[slot of B][entry of A]")
    split_half_a: list[Distance]
    split_half_b: list[Distance]
    assignment: list[Candidate]
    caveats: list[str]
    yardsticks: list[Yardstick] = Field(default_factory=list, description="by entry of A: what its natural groups differ by")
    looks: list[Look] = Field(default_factory=list, description="what each slot of B looks like")
    couplings: list[Coupling] = Field(default_factory=list, description="cosines between the slots of a row")
    effects: list[Effect] = Field(default_factory=list, description="each slot of B against its own entry, by rows")
    mixes: list[Mix] = Field(default_factory=list, description="what other shares of classes and positions make of it")
    dimensions: list[Dimension] = Field(default_factory=list, description="which dimensions carry the difference")
    carried: list[Carried] = Field(default_factory=list, description="how each slot's difference is spread over dimensions")
    sinks: list[Sinks] = Field(default_factory=list, description="channels that stand out in sinks")
    series: Series | None = Field(None, description="several fingerprints against A, in order")

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    def json_text(self) -> str:
        """The JSON, two-space indented."""
        return self.model_dump_json(by_alias=True, indent=2)


def compare(a: Place | str | Source | Fingerprint, b: Place | str | Source | Fingerprint) -> Comparison:
    """Compare two sources or fingerprints.

    Args:
        a: the reference: training states.
        b: what is held against it: a capture, or other training states. Every entry of it is looked for in `a`.

    Raises:
        DraftscopeError: one cannot be read, or the widths differ.
    """
    return compare_fingerprints(fingerprint_of(a), fingerprint_of(b))


def fingerprint_of(given: Place | str | Source | Fingerprint) -> Fingerprint:
    """Scan a source, load a fingerprint file, or pass a fingerprint through."""
    if isinstance(given, Fingerprint):
        return given
    if isinstance(given, str | Place):
        path = place(given)
        return known_fingerprint(path) or scan(open_source(path))
    return scan(given)


def known_fingerprint(path: Place) -> Fingerprint | None:
    """What a fingerprint file holds, or a capture that kept statistics alone; None where a scan has to tell."""
    if is_fingerprint(path):
        return load_fingerprint(path)
    return load_statistics(path) if is_statistics(path) else None


def compare_fingerprints(
    a: Fingerprint, b: Fingerprint, more: Sequence[Fingerprint] = (), *, token_alone: Collection[int] = ()
) -> Comparison:
    """The comparison of two fingerprints; see `compare`.

    Args:
        more: further ones, later than B: all are then held against A, in order.
        token_alone: slots of B known to hold the same vector for the same token, where those of A do not.
    """
    if len({f.width for f in (a, *more)}) > 1:
        raise DraftscopeError("fingerprints of a series have different widths", where=more[0].origins[0].path,
                              remedy="Give those of one server and target")
    if a.width != b.width:
        raise DraftscopeError(
            f"entries are {a.width} wide on one side and {b.width} on the other",
            where=" and ".join(o.path for o in (*a.origins[:1], *b.origins[:1])),
            remedy="They are of different targets, or a capture's rows were divided into the wrong number of slots",
        )
    answered = all(_rows(f, ("answer",)) >= FEW_ROWS for f in (a, b))
    classes: tuple[RowClass, ...] = ("answer",) if answered else ORDINARY
    halves_a, halves_b = (
        [distance(*(f.statistics(e, classes, (h,)) for h in (0, 1))) for e in range(len(f.entries))] for f in (a, b)
    )
    table = between(a, b, classes)
    yards = yardsticks(a, classes)
    caveats = [
        "statistics of different texts differ even where all is right",
        "split_half is the spread of sampling; the spread between natural groups of the data is larger",
        UNTOLD,
    ]
    if not all(yard.natural for yard in yards):
        caveats.append("A has no natural groups with rows enough: the unit is the distance of its halves, which is too small")
    elif a.grouped == ("runs",):
        caveats.append("A's groups are runs of neighbouring sequences: of shuffled data they differ by less than its domains do "
                       "(name the groups with `draftscope scan --groups`)")
    if not answered:
        caveats.append("answer rows are not known on both sides: prompts and answers are compared together")
    for name, f in (("A", a), ("B", b)):
        if f.sequences < 8:
            caveats.append(f"{name} has {f.sequences} sequence{'s' if f.sequences != 1 else ''}: its statistics are uncertain")
    by_rows, mixes = effects(a, b, classes, yards)
    by_dimension, carried = carriers(a, b, classes)
    return Comparison(
        schema="draftscope.compare/1", a=side_of(a), b=side_of(b), rows_compared="answer" if answered else "ordinary",
        distances=table,
        split_half_a=halves_a, split_half_b=halves_b, caveats=caveats,
        assignment=_candidates(a, b, table, halves_a, halves_b), yardsticks=yards,
        looks=looks(a, b, classes, table, yards, token_alone), couplings=couplings(a, b),
        effects=by_rows, mixes=mixes, dimensions=by_dimension, carried=carried, sinks=sinks(a, b),
        series=series([a, b, *more], classes, yards) if more else None,
    )


def _rows(fingerprint: Fingerprint, classes: Iterable[RowClass]) -> int:
    """Least number of usable rows over the entries."""
    wanted = tuple(classes)
    return min((fingerprint.statistics(e, wanted).dimensions.count for e in range(len(fingerprint.entries))), default=0)


def _candidates(
    a: Fingerprint, b: Fingerprint, table: list[list[Distance]], halves_a: list[Distance], halves_b: list[Distance]
) -> list[Candidate]:
    def matrix(name: str) -> Tensor:
        return torch.tensor([
            [value if (value := getattr(d, name)) is not None else math.nan for d in row] for row in table[: b.slots]
        ]).reshape(b.slots, len(a.entries))

    found, shapes = assign(matrix("total")), assign(matrix("shape"))
    result = []
    for s in range(b.slots):
        entry = found.entries[s]
        totals = [d.total for d in table[s]]
        others = [t for e, t in enumerate(totals) if e != entry and t is not None]
        here = None if entry is None else totals[entry]
        second = min(others, default=None)
        halves = [] if entry is None else [h.total for h in (halves_a[entry], halves_b[s]) if h.total is not None]
        sampled = max(halves, default=None)
        result.append(Candidate(
            slot=s, slot_label=b.entries[s], entry=entry, label=None if entry is None else a.entries[entry],
            nearest=found.nearest[s], distance=here, second=second, margin=found.margins[s], split_half=sampled,
            clear=None not in (here, second, sampled) and second - here > sampled,  # type: ignore[operator]
            by_shape=shapes.entries[s], says=CANDIDATE if entry is not None else "too few rows to compare",
        ))
    return result


def side_of(fingerprint: Fingerprint) -> Side:
    """A fingerprint in the figures that people read."""
    entries = []
    for e, label in enumerate(fingerprint.entries):
        classes = {name: figures(fingerprint.statistics(e, (name,))) for name in CLASSES}
        entries.append(Entry(
            entry=e, label=label, last=fingerprint.last and e == len(fingerprint.entries) - 1,
            classes=classes | {"ordinary": figures(fingerprint.statistics(e, ORDINARY))},
        ))
    return Side(
        paths=[o.path for o in fingerprint.origins], kinds=sorted({o.kind for o in fingerprint.origins}),
        sequences=fingerprint.sequences, rows=fingerprint.rows, width=fingerprint.width, dtypes=list(fingerprint.dtypes),
        notes=list(fingerprint.notes), entries=entries,
    )


def figures(statistics: Statistics) -> Figures:
    """The statistics that people read."""
    counts, norms = statistics.counts.result(), statistics.norms.result()
    dimensions, outliers = statistics.dimensions.result(), statistics.outliers.result()
    return Figures(
        rows=counts.rows, nonfinite_rows=counts.nonfinite_rows, zero_rows=counts.zero_rows, norm_mean=norms.mean,
        norm_median=norms.median, norm_p01=norms.p01, norm_p99=norms.p99, norm_min=norms.minimum, norm_max=norms.maximum,
        mean_size=None if dimensions.mean is None else float(dimensions.mean.norm()),
        std_size=None if dimensions.variance is None else float(dimensions.variance.sum().sqrt()),
        outlier_channels=outliers.channels[:8],
    )
