"""The secret that the ranks of one job share: from the environment, or from a file of this user."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from kos.errors import RendezvousError
from kos.files import cache_folder

MAX_BYTES = 4096


def load_secret(environ: Mapping[str, str], *, one_host: bool) -> bytes:
    """The secret of this job.

    It is the value of ``KOS_SECRET``, or the contents of the file that ``KOS_SECRET_FILE`` names.  Without
    both, ranks on one host use a file that only this user can read, made on first use.  Raises
    RendezvousError where the secret is empty, its file is missing or open to others, or hosts share none.
    """
    if "KOS_SECRET" in environ:
        return _not_empty(environ["KOS_SECRET"].encode(), "KOS_SECRET")
    if "KOS_SECRET_FILE" in environ:
        return _read(Path(environ["KOS_SECRET_FILE"]), "KOS_SECRET_FILE")
    if not one_host:
        raise RendezvousError(
            "KOS_SECRET: expected the same secret in every rank's environment, because this job has more "
            "than one host, got none (make one: export KOS_SECRET=$(openssl rand -hex 32))"
        )
    return _users_own(environ)


def _users_own(environ: Mapping[str, str]) -> bytes:
    """This user's secret on this host; the first process to ask makes it."""
    folder = cache_folder(environ)
    path = folder / "secret"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with NamedTemporaryFile(dir=folder, prefix=".secret-") as draft:  # of mode 0600
                draft.write(secrets.token_hex(32).encode())
                draft.flush()
                os.fsync(draft.fileno())
                with suppress(FileExistsError):
                    os.link(draft.name, path)  # complete from its first moment; of many at once, one wins
    except OSError as error:
        expected = f"expected {folder} to be writable, or KOS_SECRET to be set"
        raise RendezvousError(f"secret: {expected}, got: {error}") from error
    return _read(path, "secret")


def _read(path: Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RendezvousError(f"{what}: expected a file that can be read, got: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise RendezvousError(f"{what}: expected {path} to be its owner's alone, got mode {mode:04o}")
    if status.st_uid not in (os.geteuid(), 0):
        raise RendezvousError(f"{what}: expected {path} to belong to user {os.geteuid()}, got user {status.st_uid}")
    if len(text) > MAX_BYTES:
        raise RendezvousError(f"{what}: expected at most {MAX_BYTES} bytes in {path}, got more")
    return _not_empty(text.strip(), f"{what}: {path}")


def _not_empty(secret: bytes, what: str) -> bytes:
    if not secret:
        raise RendezvousError(f"{what}: expected a secret, got an empty one")
    return secret
