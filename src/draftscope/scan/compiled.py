"""What numba compiles. Imported by `scan.kernels` alone, where numba is installed.

Rows are given as one flat array, where the first begins and how far apart they lie, so that the compiler knows their values to
lie side by side. NaN and infinity keep their meaning: of the fast-math rules only those are on that let sums be taken in another
order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.extending import overload

Function = TypeVar("Function", bound=Callable[..., Any])
_RULES = {"reassoc", "contract", "nsz"}


def _jit(function: Function) -> Function:
    kept = Path(globals().get("__file__", "")).is_file()  # of sources that came in an archive nothing stays on the machine
    try:
        return numba.njit(nogil=True, cache=kept, fastmath=_RULES, error_model="numpy")(function)
    except RuntimeError:  # no folder that a cache could be kept in
        return numba.njit(nogil=True, fastmath=_RULES, error_model="numpy")(function)


def _value(stored: Any) -> Any:
    """A stored value as float32. Compiled code gets the overload below; nothing calls this one."""
    raise NotImplementedError


@overload(_value, strict=False)  # type: ignore[untyped-decorator]
def _value_of(stored: Any) -> Callable[[Any], Any] | None:
    if stored == numba.int16:  # bfloat16
        return lambda stored: np.uint32(np.uint32(np.uint16(stored)) << np.uint32(16)).view(np.float32)
    if stored == numba.float32:
        return lambda stored: stored

    # The exponent is moved by a product, which holds for subnormal values too.
    def half(stored: Any) -> Any:
        bits = np.uint32(stored)
        small = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
        sized = np.float32(small * np.float32(2.0**112)).view(np.uint32)
        if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):  # infinite or NaN
            sized = np.uint32(sized | np.uint32(0x7F800000))
        return np.uint32(sized | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)

    def e5m2(stored: Any) -> Any:  # the upper half of a float16
        bits = np.uint32(stored)
        small = np.uint32((bits & np.uint32(0x7F)) << np.uint32(21)).view(np.float32)
        sized = np.float32(small * np.float32(2.0**112)).view(np.uint32)
        if (bits & np.uint32(0x7C)) == np.uint32(0x7C):
            sized = np.uint32(sized | np.uint32(0x7F800000))
        return np.uint32(sized | ((bits & np.uint32(0x80)) << np.uint32(24))).view(np.float32)

    def e4m3(stored: Any) -> Any:
        bits = np.uint32(np.uint8(stored))
        small = np.uint32((bits & np.uint32(0x7F)) << np.uint32(20)).view(np.float32)
        sized = np.float32(small * np.float32(2.0**120)).view(np.uint32)
        if (bits & np.uint32(0x7F)) == np.uint32(0x7F):  # its only NaN; it has no infinity
            sized = np.uint32(0x7FC00000)
        return np.uint32(sized | ((bits & np.uint32(0x80)) << np.uint32(24))).view(np.float32)

    return {numba.uint16: half, numba.uint8: e5m2, numba.int8: e4m3}.get(stored)


@_jit
def squares(flat: Any, start: Any, step: Any, width: Any, found: Any) -> None:
    for number in range(len(found)):
        at = start + number * step
        row = flat[at : at + width]
        total = 0.0
        for k in range(width):
            value = np.float64(_value(row[k]))
            total += value * value
        found[number] = total


@_jit
def spoilt(flat: Any, start: Any, width: Any, counts: Any) -> None:
    """Count NaN and infinity of one row into counts[2] and counts[3]."""
    for k in range(start, start + width):
        value = _value(flat[k])
        if np.isnan(value):
            counts[2] += 1
        elif np.isinf(value):
            counts[3] += 1


@_jit
def classify(norms: Any, answer: Any, known: Any, begins: Any, factor: Any, cells: Any) -> None:
    """The cell of each row: 0 first token, 1 sink, then answer rows by range of positions, then other rows by range."""
    count, ranges = len(norms), len(begins)
    usable = np.empty(count)
    found = 0
    for t in range(count):
        if np.isfinite(norms[t]) and norms[t] > 0:
            usable[found] = norms[t]
            found += 1
    bar = factor * np.partition(usable[:found], (found - 1) // 2)[(found - 1) // 2] if found else np.inf
    at = 0
    for t in range(count):
        while at + 1 < ranges and t >= begins[at + 1]:
            at += 1
        if t == 0:
            cells[t] = 0
        elif np.isfinite(norms[t]) and norms[t] > bar:
            cells[t] = 1
        elif known and answer[t]:
            cells[t] = 2 + at
        else:
            cells[t] = 2 + ranges + at


@_jit
def told(flat: Any, start: Any, step: Any, width: Any, norms: Any, cells: Any, histogram: Any, small: Any, counts: Any,
         lowest: Any, per_octave: Any) -> None:
    """Rows of a sequence into their cells' counts and norms.

    `small` [cells, 7]: rows, sum of norms, rows not zero, mean of ln(norm), squared deviations from it, extremes.
    """
    last = histogram.shape[1] - 1
    for t in range(len(norms)):
        cell, norm = cells[t], norms[t]
        held, own = small[cell], counts[cell]
        own[0] += 1
        if not np.isfinite(norm):
            own[1] += 1
            spoilt(flat, start + t * step, width, own)
            continue
        held[0] += 1
        held[1] += norm
        held[5], held[6] = min(held[5], norm), max(held[6], norm)
        if norm == 0:
            own[4] += 1
            histogram[cell, 0] += 1
            continue
        histogram[cell, min(max(int(np.floor((np.log2(norm) - lowest) * per_octave)), 0), last)] += 1
        log = np.log(norm)  # Welford's moments
        held[2] += 1
        off = log - held[3]
        held[3] += off / held[2]
        held[4] += off * (log - held[3])


@_jit
def planned(norms: Any, cells: Any, factor: Any, root: Any, order: Any, bounds: Any, bars: Any) -> None:
    """Numbers of the finite rows by cell: those of cell c are order[bounds[c] : bounds[c + 1]]; and what stands out of each row.

    A bar is the largest float32 that is not above `factor` times norm / root: a float32 exceeds either or neither.
    """
    count = len(bounds) - 1
    bounds[:] = 0
    for t in range(len(cells)):
        if np.isfinite(norms[t]):
            bounds[cells[t] + 1] += 1
    for c in range(count):
        bounds[c + 1] += bounds[c]
    filled = bounds[:count].copy()
    for t in range(len(cells)):
        if not np.isfinite(norms[t]):
            continue
        order[filled[cells[t]]] = t
        filled[cells[t]] += 1
        exact = factor * norms[t] / root
        bar = np.float32(min(exact, np.float64(np.finfo(np.float32).max)))
        bars[t] = np.nextafter(bar, np.float32(-np.inf)) if np.float64(bar) > exact else bar


@_jit
def pivots(flat: Any, start: Any, step: Any, order: Any, bounds: Any, rows: Any, most: Any, sums: Any) -> None:
    """Where a cell has no rows yet: the mean of some of its first ones, evenly spread, as its pivot sums[c, 0]."""
    width = sums.shape[2]
    for cell in range(len(bounds) - 1):
        low, count = bounds[cell], bounds[cell + 1] - bounds[cell]
        if count == 0 or rows[cell] > 0:
            continue
        pivot, taken = sums[cell, 0], min(count, most)
        for number in range(taken):
            at = start + order[low + number * (count - 1) // max(taken - 1, 1)] * step
            row = flat[at : at + width]
            for k in range(width):
                pivot[k] += np.float64(_value(row[k]))
        for k in range(width):
            pivot[k] /= taken


@_jit
def moments(flat: Any, start: Any, step: Any, low: Any, high: Any, order: Any, bounds: Any, bars: Any, sums: Any, largest: Any,
            exceeds: Any) -> None:
    """Channels low .. high - 1 of the rows in `order` into the cells' sums."""
    for cell in range(len(bounds) - 1):
        begin, end = bounds[cell], bounds[cell + 1]
        if begin == end:
            continue
        _added(flat, start + low, step, order[begin:end], bars, sums[cell, 0, low:high], sums[cell, 1, low:high],
               sums[cell, 2, low:high], largest[cell, low:high], exceeds[cell, low:high])


@_jit
def _added(flat: Any, start: Any, step: Any, order: Any, bars: Any, pivot: Any, sums: Any, squares: Any, largest: Any,
           exceeds: Any) -> None:
    width, count = len(pivot), len(order)
    whole = count - count % 8
    for i in range(0, whole, 8):
        pa, pb, pc, pd = (start + order[i] * step, start + order[i + 1] * step, start + order[i + 2] * step,
                          start + order[i + 3] * step)
        pe, pf, pg, ph = (start + order[i + 4] * step, start + order[i + 5] * step, start + order[i + 6] * step,
                          start + order[i + 7] * step)
        a, b, c, d = flat[pa : pa + width], flat[pb : pb + width], flat[pc : pc + width], flat[pd : pd + width]
        e, f, g, h = flat[pe : pe + width], flat[pf : pf + width], flat[pg : pg + width], flat[ph : ph + width]
        ba, bb, bc, bd = bars[order[i]], bars[order[i + 1]], bars[order[i + 2]], bars[order[i + 3]]
        be, bf, bg, bh = bars[order[i + 4]], bars[order[i + 5]], bars[order[i + 6]], bars[order[i + 7]]
        for k in range(width):
            va, vb, vc, vd = _value(a[k]), _value(b[k]), _value(c[k]), _value(d[k])
            ve, vf, vg, vh = _value(e[k]), _value(f[k]), _value(g[k]), _value(h[k])
            origin = pivot[k]
            da, db, dc, dd = np.float64(va) - origin, np.float64(vb) - origin, np.float64(vc) - origin, np.float64(vd) - origin
            de, df, dg, dh = np.float64(ve) - origin, np.float64(vf) - origin, np.float64(vg) - origin, np.float64(vh) - origin
            sums[k] += ((da + db) + (dc + dd)) + ((de + df) + (dg + dh))
            squares[k] += ((da * da + db * db) + (dc * dc + dd * dd)) + ((de * de + df * df) + (dg * dg + dh * dh))
            va, vb, vc, vd, ve, vf, vg, vh = abs(va), abs(vb), abs(vc), abs(vd), abs(ve), abs(vf), abs(vg), abs(vh)
            largest[k] = max(largest[k], max(max(max(va, vb), max(vc, vd)), max(max(ve, vf), max(vg, vh))))
            exceeds[k] += (np.int32(va > ba) + np.int32(vb > bb) + np.int32(vc > bc) + np.int32(vd > bd)) + (
                np.int32(ve > be) + np.int32(vf > bf) + np.int32(vg > bg) + np.int32(vh > bh))
    for i in range(whole, count):
        at, bar = start + order[i] * step, bars[order[i]]
        row = flat[at : at + width]
        for k in range(width):
            value = _value(row[k])
            off = np.float64(value) - pivot[k]
            sums[k] += off
            squares[k] += off * off
            largest[k] = max(largest[k], abs(value))
            exceeds[k] += np.int32(abs(value) > bar)


@_jit
def mixed(bits: Any, multiplier: Any, shift: Any, found: Any) -> None:
    for row in range(len(found)):
        key = found[row]
        for column in range(bits.shape[1]):
            key = (key ^ bits[row, column]) * multiplier
            key = key ^ (key >> shift)
        found[row] = key
