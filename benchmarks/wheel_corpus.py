"""A pinned corpus of Python sources, from named wheels: ``python -m benchmarks.wheel_corpus --out corpus.jsonl.xz``.

A document is a file of a wheel; equal ones are there once. The file is JSON Lines, packed by xz, in the order of wheels
and paths. ``unpack`` puts the documents in an order that only their text decides, so that a part of them held out is
like the rest. pip downloads the wheels, of which the hashes are known; ``--wheels`` names a folder that has them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from kos.commands import program
from kos.errors import DataError

WHEELS = {
    "apache_airflow-2.9.2-py3-none-any.whl": "6fd6501b1622ab58f4a3c1fc5bed4c216bd36915243bb9445b54415c3e625200",
    "bokeh-3.4.1-py3-none-any.whl": "1e3c502a0a8205338fc74dadbfa321f8a0965441b39501e36796a47b4017b642",
    "dask-2024.5.2-py3-none-any.whl": "acc2cfe41d9e0151c216ac40396dbe34df13bc3d8c51dfece190349e4f2243af",
    "distributed-2024.5.2-py3-none-any.whl": "c0fd59d5c34179d9c9b5dc5acb42a00a06d163107b79f66c2dc73e9479a92286",
    "Django-5.0.6-py3-none-any.whl": "8363ac062bb4ef7c3f12d078f6fa5d154031d129a15170a1066412af49d30905",
    "homeassistant-2024.3.3-py3-none-any.whl": "6e1ec2c07441d63fdcfb8acd2c4bbb6f68bc97330855784d3623d10c38fe3577",
    "jax-0.4.28-py3-none-any.whl": "6a181e6b5a5b1140e19cdd2d5c4aa779e4cb4ec627757b918be322d8e81035ba",
    "keras-3.3.3-py3-none-any.whl": "260df9ef71c6b89eb6816ce1c60f139c38ccdddd16f24e7005d2be127cdef8e4",
    "moto-5.0.9-py2.py3-none-any.whl": "21a13e02f83d6a18cfcd99949c96abb2e889f4bd51c4c6a3ecc8b78765cb854e",
    "networkx-3.3-py3-none-any.whl": "28575580c6ebdaf4505b22c6256a2b9de86b316dc63ba9e93abde3d78dfdbcf2",
    "nltk-3.8.1-py3-none-any.whl": "fd5c9109f976fa86bcadba8f91e47f5e9293bd034474752e92a520f81c93dda5",
    "sphinx-7.3.7-py3-none-any.whl": "413f75440be4cacf328f580b4274ada4565fb2187d696a84970c23f77b64d8c3",
    "sympy-1.12.1-py3-none-any.whl": "9b2cbc7f1a640289430e13d2a56f02f867a1da0190f2f99d8968c2f74da0e515",
    "transformers-4.41.2-py3-none-any.whl": "05555d20e43f808de1ef211ab64803cdb513170cef70d29a888b589caebefc67",
    "twisted-24.3.0-py3-none-any.whl": "039f2e6a49ab5108abd94de187fa92377abe5985c7a72d68d0ad266ba19eae63",
    "wagtail-6.1.2-py3-none-any.whl": "6858f89c4a050cbbb1702ce3cb605b8360b736c296c93193c4e72ea87427d431",
    "xarray-2024.6.0-py3-none-any.whl": "721a7394e8ec3d592b2d8ebe21eed074ac077dc1bb1bd777ce00e41700b4866c",
    "yt_dlp-2024.5.27-py3-none-any.whl": "5dbedb7610ae9440cc44e744f528e078828142bbe09af950cf7e99ce69c866d9",
}
"""The wheels, by name, and their SHA-256."""

SHA256 = "2a5aa981bcb6853ed2f2dad9e45321df9a1e9e4172fdb623fce79e79640b6ac1"
"""Of the lines of the corpus, in the order of the file."""

SIZES = range(200, 1_000_000)
"""Characters of a document: what is shorter says little, what is longer is data."""


def download(folder: Path) -> None:
    """The wheels, by pip, which compares their hashes."""
    wanted = folder / "wanted.txt"
    named = ([*wheel.split("-")[:2], digest] for wheel, digest in WHEELS.items())
    wanted.write_text("".join(f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in named))
    how = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(wanted)]
    subprocess.run([sys.executable, "-m", "pip", *how, "--dest", str(folder)], check=True)


def lines(folder: Path, wheels: dict[str, str] = WHEELS) -> Iterator[bytes]:
    """The corpus, of the wheels in a folder. DataError: a wheel is missing, or another one."""
    seen = set[bytes]()
    for name, digest in wheels.items():
        path = folder / name
        got = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
        if got != digest:
            raise DataError(f"--wheels {folder}: expected {name} of SHA-256 {digest}, got {got}")
        with zipfile.ZipFile(path) as wheel:
            for member in sorted(each for each in wheel.namelist() if each.endswith(".py")):
                content = wheel.read(member)
                try:
                    text = content.decode()
                except UnicodeDecodeError:
                    continue
                key = hashlib.sha256(content).digest()
                if len(text) in SIZES and key not in seen:
                    seen.add(key)
                    yield json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n"


def pack(folder: Path, out: Path, wheels: dict[str, str] = WHEELS) -> tuple[int, int, str]:
    """Write the corpus: the number of its documents, the bytes of their texts, and the SHA-256 of its lines."""
    count, size, digest = 0, 0, hashlib.sha256()
    out.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(out, "wb", preset=6) as file:
        for line in lines(folder, wheels):
            file.write(line)
            digest.update(line)
            count, size = count + 1, size + len(json.loads(line)["text"].encode())
    return count, size, digest.hexdigest()


def unpack(path: Path) -> Path:
    """The corpus as a file that ``--data`` reads, made beside ``path`` if it is not there: the documents by the hashes
    of their lines. DataError: it cannot be read."""
    if path.suffix != ".xz" or (out := path.with_suffix("")).is_file():
        return path if path.suffix != ".xz" else out
    if not path.is_file():
        raise DataError(f"--corpus: expected a file, got {path}")
    with lzma.open(path) as file:
        documents = sorted(file, key=lambda line: hashlib.sha256(line).digest())
    with tempfile.NamedTemporaryFile(dir=out.parent, delete=False) as made:
        made.writelines(documents)
    os.replace(made.name, out)
    return out


def main(argv: list[str] | None = None, wheels: dict[str, str] = WHEELS, expected: str = SHA256) -> None:
    parser = argparse.ArgumentParser(
        program("benchmarks.wheel_corpus"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the corpus, .jsonl.xz")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="the wheels (default: pip downloads them)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.wheels is None:
            download(Path(temporary))
        count, size, digest = pack(arguments.wheels or Path(temporary), arguments.out, wheels)
    print(f"{arguments.out}: {count:,} documents, {size:,} bytes of text, SHA-256 {digest}")
    if digest != expected:
        raise SystemExit(f"expected a corpus of SHA-256 {expected}, got {digest}")


if __name__ == "__main__":
    main()
