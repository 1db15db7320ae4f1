"""The secret that the ranks of one job share: from the environment, or a file of this user."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from tempfile import NamedTemporaryFile

from kos.environment import KOS_SECRET
from kos.errors import RendezvousError
from kos.files import cache_folder


def load_secret(environ: Mapping[str, str]) -> bytes:
    """The secret of this job: the value of ``KOS_SECRET``, else the user's secret.

    A user's secret is a file that only this user can read, created on first use.  Ranks on several hosts need
    ``KOS_SECRET``, unless they share the user's home.  Raises RendezvousError if the secret is empty, or its file
    cannot be used or is readable by others.
    """
    given = KOS_SECRET.name in environ
    secret = KOS_SECRET.get(environ).encode(errors="surrogateescape") if given else _users_own(environ)
    if not secret:
        raise RendezvousError("KOS_SECRET: expected a secret, got an empty one")
    return secret


def _users_own(environ: Mapping[str, str]) -> bytes:
    """This user's secret on this host; the first process creates it."""
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
                    os.link(draft.name, path)  # atomic: of several processes, one succeeds
        with open(path, "rb") as file:
            status, text = os.fstat(file.fileno()), file.read()
    except OSError as error:
        expected = f"expected {folder} to be writable and {path} to be readable, or KOS_SECRET to be set"
        raise RendezvousError(f"secret: {expected}, got: {error}") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise RendezvousError(f"secret: expected {path} to be its owner's alone, got mode {mode:04o}")
    if status.st_uid not in (os.geteuid(), 0):
        raise RendezvousError(f"secret: expected {path} to belong to user {os.geteuid()}, got user {status.st_uid}")
    return text.strip()
