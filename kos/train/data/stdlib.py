"""The default corpus: sources of Python's own standard library, real text that every Python ships.

The selection is fixed: files that CPython 3.11 to 3.14 all have, also Debian's, without tests, platform stubs
and tables of data.  Their text differs between versions of Python, and so does the fingerprint of the data.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from kos.errors import DataError

_TRAIN = """
_collections_abc _markupbase _pydecimal _pyio _strptime _weakrefset argparse ast
asyncio/base_events asyncio/events asyncio/locks asyncio/proactor_events asyncio/queues asyncio/runners
asyncio/selector_events asyncio/sslproto asyncio/taskgroups asyncio/tasks asyncio/transports
asyncio/unix_events base64 bdb bz2 calendar cmd code codecs collections/__init__ compileall
concurrent/futures/_base concurrent/futures/process configparser contextlib copy csv ctypes/__init__
dataclasses difflib dis doctest email/_header_value_parser email/_parseaddr email/_policybase
email/contentmanager email/feedparser email/generator email/header email/headerregistry email/message
email/policy email/utils enum filecmp fileinput ftplib functools getopt gettext glob gzip hashlib heapq
hmac html/parser http/client http/cookiejar http/server imaplib inspect ipaddress json/__init__
json/decoder json/encoder linecache logging/__init__ logging/config logging/handlers lzma mailbox
mimetypes modulefinder multiprocessing/connection multiprocessing/context multiprocessing/managers
multiprocessing/pool multiprocessing/process multiprocessing/queues multiprocessing/synchronize
multiprocessing/util netrc ntpath numbers operator optparse os pdb pickle pickletools pkgutil platform
plistlib poplib posixpath pprint pstats pyclbr pydoc random re/__init__ re/_compiler re/_parser reprlib
runpy selectors shelve shutil site smtplib socket socketserver ssl statistics subprocess tabnanny tarfile
tempfile threading timeit tokenize trace traceback tracemalloc types typing unittest/case unittest/loader
unittest/main unittest/mock unittest/runner unittest/suite urllib/parse urllib/request uuid warnings
weakref wsgiref/handlers xml/dom/expatbuilder xml/dom/minidom xml/etree/ElementTree xml/sax/expatreader
xml/sax/saxutils xmlrpc/client xmlrpc/server zipimport zoneinfo/_zoneinfo
"""

_VAL = """
asyncio/futures asyncio/streams concurrent/futures/thread copyreg email/parser fractions graphlib
http/cookies multiprocessing/shared_memory queue sched shlex textwrap unittest/result urllib/robotparser
wsgiref/validate xml/etree/ElementPath
"""

TRAIN, VAL = tuple(_TRAIN.split()), tuple(_VAL.split())


def read_stdlib(root: Path | None = None) -> tuple[list[str], list[str]]:
    """The training and the held-out files, as text, in a fixed order.  DataError where Python came without them."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    try:
        train, val = ([(root / f"{name}.py").read_text("utf-8") for name in names] for names in (TRAIN, VAL))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--data stdlib: expected this Python to ship its sources, got {error}; give --data PATH"
        ) from None
    return train, val
