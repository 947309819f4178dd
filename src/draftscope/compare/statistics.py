"""Two sources side by side, without pairing tokens: norms, profiles over dimensions, and which slot could be which entry.

Statistics of different texts differ even where everything is right, and neighbouring boundaries have nearly the same ones. So
what comes out is a candidate, never proof of a displacement by one; `diagnose` with the target proves.

*Distance* of two entries, over ordinary rows (no first tokens, no sinks), is the root of the sum of three squares:

- norms: the 1-Wasserstein distance of the distributions of log norms, in nats (0.1 is a difference of about 10 %);
- means: |difference of the means over dimensions| / root mean square size of a row;
- spread: the median over dimensions of |log ratio of the standard deviations|.

`shape` is the same without scale: both profiles divided by the size of their rows, norms left out. Beside each stands the
distance between the two halves of the source's own sequences (`split_half`): what sampling alone makes of it. That is
smaller than the spread between natural groups of the data, which is the yardstick to be preferred.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from draftscope.compare.assignment import assign
from draftscope.errors import DraftscopeError
from draftscope.scan.accumulators import BINS_PER_OCTAVE, Norms
from draftscope.scan.fingerprint import CLASSES, ORDINARY, Fingerprint, RowClass, Statistics, is_fingerprint, load_fingerprint
from draftscope.scan.scan import scan
from draftscope.states.opening import open_source
from draftscope.states.places import Place, place
from draftscope.states.types import Source

FEW_ROWS = 50
"""Below this many answer rows on either side, all ordinary rows are compared."""

CANDIDATE = (
    "a candidate from statistics alone: neighbouring boundaries look alike, so a displacement by one is neither proven nor "
    "excluded"
)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


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


class Distance(Model):
    """Two entries against each other; None where a side has too few rows."""

    total: float | None = None
    norms: float | None = None
    means: float | None = None
    spread: float | None = None
    shape: float | None = None


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


class Comparison(Model):
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
        return load_fingerprint(path) if is_fingerprint(path) else scan(open_source(path))
    return scan(given)


def compare_fingerprints(a: Fingerprint, b: Fingerprint) -> Comparison:
    """The comparison of two fingerprints; see `compare`."""
    if a.width != b.width:
        raise DraftscopeError(
            f"entries are {a.width} wide on one side and {b.width} on the other",
            where=" and ".join(o.path for o in (*a.origins[:1], *b.origins[:1])),
            remedy="They are of different targets, or a capture's rows were divided into the wrong number of slots",
        )
    answered = all(_rows(f, ("answer",)) >= FEW_ROWS for f in (a, b))
    classes: tuple[RowClass, ...] = ("answer",) if answered else ORDINARY
    whole_a, whole_b = ([f.statistics(e, classes) for e in range(len(f.entries))] for f in (a, b))
    halves_a, halves_b = (
        [distance(*(f.statistics(e, classes, (h,)) for h in (0, 1))) for e in range(len(f.entries))] for f in (a, b)
    )
    table = [[distance(whole_a[e], whole_b[s]) for e in range(len(a.entries))] for s in range(len(b.entries))]
    caveats = [
        "statistics of different texts differ even where all is right",
        "split_half is the spread of sampling; the spread between natural groups of the data is larger",
    ]
    if not answered:
        caveats.append("answer rows are not known on both sides: prompts and answers are compared together")
    for name, f in (("A", a), ("B", b)):
        if f.sequences < 8:
            caveats.append(f"{name} has {f.sequences} sequence{'s' if f.sequences != 1 else ''}: its statistics are uncertain")
    return Comparison(
        schema="draftscope.compare/1", a=side_of(a), b=side_of(b), rows_compared="answer" if answered else "ordinary",
        distances=table,
        split_half_a=halves_a, split_half_b=halves_b, caveats=caveats,
        assignment=_candidates(a, b, table, halves_a, halves_b),
    )


def distance(a: Statistics, b: Statistics) -> Distance:
    """Distance of two entries; all None where either has fewer than two rows."""
    first, second = a.dimensions.result(), b.dimensions.result()
    if first.mean is None or second.mean is None or min(first.count, second.count) < 2:
        return Distance()
    assert first.variance is not None and second.variance is not None
    sizes = [(m.square() + v).sum().sqrt() for m, v in ((first.mean, first.variance), (second.mean, second.variance))]
    size = torch.stack(sizes).square().mean().sqrt()
    if size == 0:
        return Distance(total=0.0, norms=0.0, means=0.0, spread=0.0, shape=0.0)
    norms = wasserstein(a.norms, b.norms)
    means = float((first.mean - second.mean).norm() / size)
    spread = _spread(first.variance, second.variance)
    shape = math.inf
    if min(float(s) for s in sizes) > 0:
        scaled = [r / s for r, s in zip((first.mean, second.mean), sizes, strict=True)]
        shape = math.hypot(
            float((scaled[0] - scaled[1]).norm()),
            _spread(first.variance / sizes[0].square(), second.variance / sizes[1].square()),
        )
    return Distance(total=math.hypot(norms, means, spread), norms=norms, means=means, spread=spread, shape=shape)


def _spread(a: Tensor, b: Tensor) -> float:
    """Median over dimensions of |log ratio of the standard deviations|; a dimension that never varies counts as 1e-6 of all."""
    floor_a, floor_b = (1e-12 * v.mean().clamp_min(1e-300) for v in (a, b))
    floor = torch.maximum(floor_a, floor_b)
    return float((0.5 * (a.clamp_min(floor).log() - b.clamp_min(floor).log())).abs().median())


def wasserstein(a: Norms, b: Norms) -> float:
    """1-Wasserstein distance of two distributions of log norms, in nats, from their histograms."""
    shares = [n.histogram.double() / n.histogram.sum().clamp_min(1) for n in (a, b)]
    return float((shares[0] - shares[1]).cumsum(0).abs().sum()) * math.log(2) / BINS_PER_OCTAVE


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
