"""What came so far of a scan elsewhere, in a file beside its output: the same scan goes on from there after a lost connection.

The file is a fingerprint; its name says of which scan, over which files, and how many of them it holds:
`.OUT.{job}-{listing}-{files}.partial`. A newer one is complete before the older goes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftscope.errors import DraftscopeError
from draftscope.scan.fingerprint import Fingerprint, load_fingerprint

DIGITS = 16


@dataclass
class Partial:
    """How far a scan has got: `made` holds the first `next` files of a listing."""

    out: Path
    job: str
    made: Fingerprint | None = None
    next: int = 0
    listing: str | None = None

    @classmethod
    def of(cls, out: Path, job: Mapping[str, Any]) -> Partial:
        """What an earlier run of the same job left; a file that cannot be read counts as none."""
        text = json.dumps(job, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        partial = cls(out, hashlib.blake2b(text, digest_size=DIGITS // 2).hexdigest())
        for number, listing, path in sorted(partial._files(), reverse=True):
            with suppress(DraftscopeError, OSError):
                partial.made, partial.next, partial.listing = load_fingerprint(path), number, listing
                break
        return partial

    def keep(self) -> None:
        """Write how far it has got.

        Raises:
            DraftscopeError: the disk refuses; what was kept before stays.
        """
        if self.made is None or self.listing is None:
            return
        path = self.out.parent / f".{self.out.name}.{self.job}-{self.listing[:DIGITS]}-{self.next}.partial"
        self.made.save(path)
        self.clear(path)

    def clear(self, but: Path | None = None) -> None:
        """Remove what was kept."""
        for _, _, path in self._files():
            if path != but:
                with suppress(OSError):
                    path.unlink()

    def _files(self) -> list[tuple[int, str, Path]]:
        shape = re.compile(rf"\.{re.escape(self.out.name)}\.{self.job}-([0-9a-f]{{{DIGITS}}})-(\d+)\.partial")
        with suppress(OSError):
            return [(int(told[2]), told[1], path) for path in self.out.parent.iterdir() if (told := shape.fullmatch(path.name))]
        return []
