"""The house itself: imports go one way, modules stay small, what is documented and declared is there."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import draftscope
from draftscope.cli.main import TABLE, available, load

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "draftscope"

# A module may import from its own room and from those before it.
ROOMS = [
    "errors", "text", "stopping", "shares", "boundaries", "views", "showing", "findings", "states", "scan", "opened",
    "target", "eagle3", "consumers", "counterfactual", "engines", "pipeline", "compare", "faults", "linting", "inspecting",
    "elsewhere", "diagnose", "report", "viewing", "bundling", "embedded", "drilling", "gating", "cli", "__main__",
]
LONGEST = 400
WHOLE = {"inside.py": 1800}  # runs in engines' environments as one file

# Used without an import of ours, or by no name of its own.
INDIRECT = {
    "accelerate": "transformers loads large targets through it",
    "gguf": "transformers reads GGUF files with it",
    "tokenizers": "transformers' tokenizers",
}
MODULES = {"jinja2": {"jinja2", "markupsafe"}}


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE or p.name != "__init__.py")


def room(name: str) -> str | None:
    """The room of a dotted module name, None if it is none of ours."""
    parts = name.split(".")
    return parts[1] if parts[0] == "draftscope" and len(parts) > 1 else None


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names imported anywhere in a module, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            bare = node.module == "draftscope"
            found += [(f"draftscope.{alias.name}" if bare else str(node.module), node.lineno) for alias in node.names]
    return found


def test_every_room_is_known() -> None:
    present = {p.stem if p.is_file() else p.name for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert present - {"__init__"} <= set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for name, line in imports(path):
        other = room(name)
        if other is not None:
            assert ROOMS.index(other) <= ROOMS.index(own), f"{path.name}:{line}: {own} may not import {other}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_modules_are_of_one_concept(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= WHOLE.get(path.name, LONGEST)
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module says what it is for"


def test_dependencies_are_those_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=~\[; ]", d)[0].lower().replace("_", "-") for d in project["dependencies"]}
    optional = {
        re.split(r"[<>=~\[; ]", d)[0].lower().replace("_", "-")
        for name, extra in project["optional-dependencies"].items() if name != "dev" for d in extra
    }
    used = set()
    for path in SOURCE.rglob("*.py"):
        used |= {name.split(".")[0] for name, _ in imports(path)}
    used -= set(sys.stdlib_module_names) | {"draftscope", "__future__"}
    owners = {module: {n.lower().replace("_", "-") for n in names} for module, names in metadata.packages_distributions().items()}
    for module in sorted(used):
        names = owners.get(module, {module.lower().replace("_", "-")})
        covered = {d for d in declared | optional if module in MODULES.get(d, set())}
        assert names & (declared | optional) or covered, f"{module} is imported but not declared"
    for name in sorted(declared - set(INDIRECT)):
        assert any(name in owners.get(module, {module}) for module in used), f"{name} is declared but never imported"


def test_dependencies_are_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    for requirement in project["dependencies"]:
        assert f"`{re.split(r'[<>=~;]', requirement)[0]}`" in text


def test_the_lock_covers_what_is_declared() -> None:
    locked = {}
    for line in (ROOT / "requirements" / "lock.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            locked[name.lower().replace("_", "-")] = version
            assert "+" not in version, "no local versions"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        assert re.split(r"[<>=~\[;]", requirement)[0].lower() in locked


def without_words(schema: object) -> object:
    """A schema without its descriptions."""
    if isinstance(schema, dict):
        return {key: without_words(value) for key, value in schema.items() if key != "description" or not isinstance(value, str)}
    return [without_words(value) for value in schema] if isinstance(schema, list) else schema


def test_schemas_are_published_and_current() -> None:
    scripts = runpy.run_path(str(ROOT / "scripts" / "schemas"))
    folder = SOURCE / "schemas"
    assert {p.stem for p in folder.iterdir()} == set(scripts["MODELS"])
    for name, model in scripts["MODELS"].items():
        published = json.loads((folder / f"{name}.json").read_text())
        assert without_words(published) == without_words(json.loads(scripts["text"](model))), "run `make schemas`"


def test_the_schema_is_the_contract() -> None:
    schema = json.loads((SOURCE / "schemas" / "diagnosis-1.json").read_text())
    assert schema["properties"]["schema"]["const"] == "draftscope.diagnosis/1"
    assert set(schema["properties"]) >= {
        "schema", "verdict", "findings", "placement", "acceptance", "matched", "power", "next", "steps", "provenance",
    }
    assert set(schema["$defs"]["Finding"]["properties"]) >= {
        "fault", "where", "says", "strength", "confidence", "recovery", "acceptance", "evidence", "fix", "caveats",
    }
    assert set(schema["$defs"]["Rung"]["properties"]) >= {
        "k", "length", "interval", "joint", "conditional", "nll", "coverage", "rounds", "rows", "readout", "held_out",
    }


def test_public_names_are_there() -> None:
    for name in draftscope.__all__:
        assert getattr(draftscope, name) is not None
        assert name in dir(draftscope)
    with pytest.raises(AttributeError):
        draftscope.nothing_of_that_name  # noqa: B018


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, draftscope; print([m for m in ('torch', 'transformers', 'pydantic', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = ("import sys; from draftscope.cli.main import run; run(sys.argv[1:]); "
            "print([m for m in ('torch', 'transformers', 'numpy', 'scipy', 'numba') if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout


def blocks(language: str) -> list[str]:
    """Fenced blocks of the README in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def shell_lines() -> list[str]:
    joined = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def test_readme_commands_exist() -> None:
    commands = [line.split(" -- ")[0].split()[1:] for line in shell_lines() if line.startswith("draftscope ")]
    assert {words[0] for words in commands} >= set(available())
    for words in commands:
        assert words[0] in available(), f"draftscope {words[0]} is in the README but not in the package"
        command = load(words[0])
        for word in words[1:]:
            if word in getattr(command, "commands", {}):
                command = command.commands[word]
        options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for word in words[1:]:
            if word.startswith("-"):
                assert word.split("=")[0] in options, f"draftscope {words[0]} has no {word}"


def test_readme_make_targets_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    used = [line.split()[1] for line in shell_lines() if line.startswith("make ")]
    assert used
    assert set(used) <= set(targets)


def test_readme_capture_is_a_plain_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ten lines, run as they stand on a draft of one layer."""
    import torch

    from draftscope.states.opening import open_source

    code = next(block for block in blocks("python") if "register_forward_pre_hook" in block)
    monkeypatch.chdir(tmp_path)
    draft = torch.nn.Module()
    draft.fc = torch.nn.Linear(24, 8)

    def serve_one_request() -> list[int]:
        with torch.no_grad():
            draft.fc(torch.randn(4, 24))
            draft.fc(torch.randn(1, 24))
        return [5, 6, 7, 8, 9]

    exec(compile(code, "README.md", "exec"), {"draft": draft, "serve_one_request": serve_one_request})
    (trace,) = open_source(tmp_path / "capture")
    assert trace.fc_input.shape == (5, 24)
    assert trace.token_ids.tolist() == [5, 6, 7, 8, 9]


def test_changelog_names_the_version() -> None:
    assert f"## [{metadata.version('draftscope')}]" in (ROOT / "CHANGELOG.md").read_text() or "## [Unreleased]" in (
        ROOT / "CHANGELOG.md").read_text()


def test_nothing_speaks_of_a_registry_host() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yaml", ".css", ".html", ""} and path.is_file():
            text = path.read_text(errors="ignore")
            assert not re.search(r"(?:index-url|find-links|files\.pythonhosted|pypi\.org/simple|artifactory|/opt/)", text) or (
                path == Path(__file__).resolve()), name


def test_every_command_of_the_table_has_one_line_of_help() -> None:
    for entry in TABLE.values():
        assert entry.help.endswith(".")
        assert len(entry.help) <= 66  # one line of 80 columns
