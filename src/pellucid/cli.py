"""`pellucid COMMAND ...`. Exit status: 0 when done, 2 for what the user must mend, 130 after Ctrl-C."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from pellucid import __version__
from pellucid.commands import line
from pellucid.machine import disk
from pellucid.machine.harmless import harmless
from pellucid.machine.interrupts import INTERRUPTED, handled, interrupt
from pellucid.types import StrandedError, UserError

ANOTHER_PATH = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO)


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    quiet_libraries()
    if disk.is_here_gone():
        sys.exit(mend(disk.GONE))
    try:
        with handled(interrupt):
            sys.exit(answer(words))
    except UserError as error:
        sys.exit(mend(str(error)))
    except StrandedError as error:
        mend(str(error))
        sys.exit(1)
    except OSError as error:
        if disk.is_here_gone():
            sys.exit(mend(disk.GONE))
        place = error.filename or "the run folder"
        if error.errno in ANOTHER_PATH:
            sys.exit(mend(f"{place}: {error.strerror}: choose another path"))
        if error.errno in NO_ROOM:
            sys.exit(mend(f"{place}: {error.strerror}; what was saved before is whole"))
        raise
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def answer(words: Sequence[str]) -> int:
    """Do what the command line says. Return the exit status."""
    if "--version" in words:
        print(f"pellucid {__version__}")
        return 0
    if not words or {"-h", "--help", "--help-all"} & set(words):
        line.help_on(words)
        return 0 if words else 2
    return line.parsed(words)()


def mend(message: str) -> int:
    print(f"pellucid: {harmless(message)}", file=sys.stderr)
    return 2


def quiet_libraries() -> None:
    """Silence the progress bars and advice of libraries, which would mix with our output; their errors stay."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a lost process is told with stacks of C++
