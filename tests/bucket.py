"""A real S3-compatible server on the loopback (moto's, in an environment of its own), for the tests of s3:// URLs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftscope"
ENVIRONMENT = Path(os.environ.get("DRAFTSCOPE_ENVS", Path(os.environ.get("DRAFTSCOPE_CACHE", CACHE)) / "envs")) / "remote"

SERVER = """
import sys
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Bucket:
    """A bucket of the server, filled from local folders."""

    def __init__(self, endpoint: str, fs: Any) -> None:
        self.endpoint, self.fs, self.name = endpoint, fs, "states"
        fs.mkdir(self.name)

    def put(self, folder: Path) -> str:
        """Upload a folder; its URL."""
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.fs.pipe_file(f"{self.name}/{folder.name}/{file.relative_to(folder)}", file.read_bytes())
        return f"s3://{self.name}/{folder.name}"


@pytest.fixture(scope="module", name="endpoint")
def endpoint_fixture() -> Iterator[str]:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no S3 server at {ENVIRONMENT} (make test-remote makes it)")
    server = subprocess.Popen([python, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    server.terminate()
    server.wait()
    server.stdout.close()


@pytest.fixture(name="s3")
def s3_fixture(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    s3fs = pytest.importorskip("s3fs")
    for name, value in {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "sesame-open",
                        "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", "AWS_CONFIG_FILE": os.devnull,
                        "AWS_SHARED_CREDENTIALS_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    made = Bucket(endpoint, s3fs.S3FileSystem(skip_instance_cache=True))
    yield made
    made.fs.rm(made.name, recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()
