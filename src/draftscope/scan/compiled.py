"""What numba compiles. Imported by `scan.kernels` alone, where numba is installed.

Rows are given as one flat array and where each begins, so that the compiler knows their values to lie side by side. NaN and
infinity keep their meaning: of the fast-math rules only those are on that let sums be taken in another order.
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
    kept = Path(__file__).is_file()  # of sources that came in an archive nothing stays on the machine
    try:
        return numba.njit(nogil=True, cache=kept, fastmath=_RULES, error_model="numpy")(function)
    except RuntimeError:  # no folder that a cache could be kept in
        return numba.njit(nogil=True, fastmath=_RULES, error_model="numpy")(function)


def _value(stored: Any) -> Any:
    """A stored value as float32."""
    raise NotImplementedError


@overload(_value, strict=False)  # type: ignore[untyped-decorator]
def _value_of(stored: Any) -> Callable[[Any], Any] | None:
    if stored == numba.int16:  # bfloat16
        return lambda stored: np.uint32(np.uint32(np.uint16(stored)) << np.uint32(16)).view(np.float32)
    if stored == numba.float32:
        return lambda stored: stored
    if stored != numba.uint16:
        return None

    def half(stored: Any) -> Any:
        bits = np.uint32(stored)
        # The exponent is moved by a product, which holds for subnormal values too.
        small = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13)).view(np.float32)
        sized = np.float32(small * np.float32(2.0**112)).view(np.uint32)
        if (bits & np.uint32(0x7C00)) == np.uint32(0x7C00):  # infinite or NaN
            sized = np.uint32(sized | np.uint32(0x7F800000))
        return np.uint32(sized | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)

    return half


@_jit
def squares(flat: Any, step: Any, width: Any, found: Any) -> None:
    for number in range(len(found)):
        row = flat[number * step : number * step + width]
        total = 0.0
        for k in range(width):
            value = np.float64(_value(row[k]))
            total += value * value
        found[number] = total


@_jit
def pivot(flat: Any, starts: Any, found: Any) -> None:
    width = len(found)
    for start in starts:
        row = flat[start : start + width]
        for k in range(width):
            found[k] += np.float64(_value(row[k]))
    for k in range(width):
        found[k] /= len(starts)


@_jit
def moments(flat: Any, starts: Any, bars: Any, pivot: Any, sums: Any, squares: Any, largest: Any, exceeds: Any) -> None:
    width, count = len(pivot), len(starts)
    whole = count - count % 4
    for i in range(0, whole, 4):
        a, b = flat[starts[i] : starts[i] + width], flat[starts[i + 1] : starts[i + 1] + width]
        c, d = flat[starts[i + 2] : starts[i + 2] + width], flat[starts[i + 3] : starts[i + 3] + width]
        for k in range(width):
            va, vb, vc, vd = _value(a[k]), _value(b[k]), _value(c[k]), _value(d[k])
            origin = pivot[k]
            da, db, dc, dd = np.float64(va) - origin, np.float64(vb) - origin, np.float64(vc) - origin, np.float64(vd) - origin
            sums[k] += (da + db) + (dc + dd)
            squares[k] += (da * da + db * db) + (dc * dc + dd * dd)
            va, vb, vc, vd = abs(va), abs(vb), abs(vc), abs(vd)
            largest[k] = max(largest[k], max(max(va, vb), max(vc, vd)))
            exceeds[k] += np.int32(va > bars[i]) + np.int32(vb > bars[i + 1]) + np.int32(vc > bars[i + 2]) + np.int32(
                vd > bars[i + 3])
    for i in range(whole, count):
        row, bar = flat[starts[i] : starts[i] + width], bars[i]
        for k in range(width):
            value = _value(row[k])
            off = np.float64(value) - pivot[k]
            sums[k] += off
            squares[k] += off * off
            largest[k] = max(largest[k], abs(value))
            exceeds[k] += np.int32(abs(value) > bar)


@_jit
def norms(values: Any, histogram: Any, moments: Any, extremes: Any, lowest: Any, per_octave: Any) -> Any:
    zeros, last = 0, len(histogram) - 1
    for value in values:
        moments[0] += 1
        moments[1] += value
        extremes[0], extremes[1] = min(extremes[0], value), max(extremes[1], value)
        if value == 0:
            zeros += 1
            histogram[0] += 1
            continue
        histogram[min(max(int(np.floor((np.log2(value) - lowest) * per_octave)), 0), last)] += 1
        log = np.log(value)  # Welford's moments
        moments[2] += 1
        off = log - moments[3]
        moments[3] += off / moments[2]
        moments[4] += off * (log - moments[3])
    return zeros


@_jit
def mixed(bits: Any, multiplier: Any, shift: Any, found: Any) -> None:
    for row in range(len(found)):
        key = found[row]
        for column in range(bits.shape[1]):
            key = (key ^ bits[row, column]) * multiplier
            key = key ^ (key >> shift)
        found[row] = key
