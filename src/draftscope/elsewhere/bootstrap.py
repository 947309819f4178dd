"""Runs first on the other machine, from ssh's stdin: old Pythons must be able to read it, and it writes no file.

What follows it on stdin: one line with the length of a packed JSON object, that object (`oldest`: Python version, `mark`,
`modules`: sources by name, `job`), then a byte now and then for as long as the other side wants the answer.
"""

import builtins
import importlib.abc
import importlib.machinery
import json
import sys
import zlib


class Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules from sources in memory."""

    def __init__(self, sources):  # type: ignore[no-untyped-def]
        self.sources = sources

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self.sources:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=self.sources[name]["package"])
        spec.origin = "draftscope:" + name
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        run = getattr(builtins, "exec")  # noqa: B009
        run(compile(self.sources[module.__name__]["source"], "<" + module.__name__ + ">", "exec"), module.__dict__)


def main():  # type: ignore[no-untyped-def]
    stdin = sys.stdin.buffer
    held = json.loads(zlib.decompress(stdin.read(int(stdin.readline()))).decode())
    if list(sys.version_info[:2]) < held["oldest"]:
        sys.stderr.write("draftscope: this is Python " + sys.version.split()[0] + "\n")
        sys.exit(held["too_old"])
    sys.dont_write_bytecode = True
    sys.path = [place for place in sys.path if place]
    for name in [name for name in sys.modules if name.split(".")[0] == "draftscope"]:
        del sys.modules[name]
    sys.meta_path.insert(0, Carried(held["modules"]))
    from draftscope.elsewhere.far import work

    work(held["mark"], held["job"])


if __name__ == "__main__":
    main()
