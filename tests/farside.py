"""A real sshd on the loopback, with keys and a configuration of its own, for the tests of `--on`."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@dataclass
class Far:
    """The other machine: `name` for `--on`, `python` for `--python`, and the server's process."""

    name: str
    python: str
    server: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, str]

    def interpreter(self, name: str, before: str) -> str:
        """An interpreter there in which `before` has been run, as another installation would be."""
        path = self.folder / name
        path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c \"import sys; {before}; exec(sys.argv[1])\" \"$2\"\n")
        path.chmod(0o755)
        return str(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(name="far")
def far_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    ssh = shutil.which("ssh")
    if SSHD is None or ssh is None or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here (Debian: apt-get install openssh-server)")
    folder = tmp_path / "far"
    folder.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    port, user = free_port(), getpass.getuser()
    public = (folder / "user.pub").read_text()
    (folder / "authorized").write_text(public)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\n"
        f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPidFile {folder}/pid\n"
        "PermitRootLogin prohibit-password\n")
    (folder / "ssh_config").write_text(
        f"Host far\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/user\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder}/known\n StrictHostKeyChecking accept-new\n BatchMode yes\n LogLevel ERROR\n")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd's unprivileged part lives
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    assert server.stderr is not None
    while b"listening" not in (line := server.stderr.readline()):
        if not line:
            pytest.skip("sshd does not start here")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "ssh").write_text(f"#!/bin/sh\nexec '{ssh}' -F '{folder}/ssh_config' \"$@\"\n")
    (commands / "ssh").chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    yield Far(f"{user}@far", sys.executable, server, folder, {**os.environ, "PATH": path})
    server.terminate()
    server.wait()
    server.stderr.close()
