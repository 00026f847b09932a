"""The first import of torch: nothing of it is garbage, and nothing is looked for there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in here what imports torch, while the garbage collector rests.

    It would look again and again through modules that stay until the process ends, which takes as long as half of the
    import itself; it leaves them alone from here on, also at the end. Where torch is imported already nothing is done:
    the process is another program's, and so is its garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
