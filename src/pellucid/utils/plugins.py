"""How an object of the user's own is found: `module:Name`, `path/to/file.py:Name`, or `here:Name` in this process."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.util
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pellucid.types import MissingFileError, UserError
from pellucid.utils.text import escape_controls

IN_PROCESS_PREFIX = "here:"
"""What the name of an object begins with that was given to `pellucid.train`, and that no other process can find."""
USER_IMPORT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a file of the user's own may raise while it is imported, besides SyntaxError and ImportError."""
PACKAGE_PREFIX = "pellucid."
_in_process_objects: ContextVar[Mapping[str, Any]] = ContextVar("given")
_module_digests: dict[str, str] = {}
"""The digests of the user's files when they were first asked for here, by the names of their modules."""


class ObjectNotInProcessError(UserError):
    """What was given to `pellucid.train` as an object is asked for in another process."""


@contextmanager
def provide_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """In here each of these names, "here:NAME", stands for its object."""
    token = _in_process_objects.set(objects)
    try:
        yield
    finally:
        _in_process_objects.reset(token)


def load_object(spec: str) -> Any:
    """The object that `module:Name`, `path/to/file.py:Name` or `here:Name` names. UserError where there is none."""
    source, _, name = spec.rpartition(":")
    if spec.startswith(IN_PROCESS_PREFIX):
        objects = _in_process_objects.get({})
        if spec not in objects:
            raise ObjectNotInProcessError(
                f'"{spec}" is an object that was given to pellucid.train: give it again there, or put it into a file'
                f' and name "path/to/file.py:{name}"'
            )
        return objects[spec]
    if not name or not (source.endswith(".py") or all(part.isidentifier() for part in source.split("."))):
        raise UserError(f'"{spec}" names no object: write "path/to/file.py:Name" or "module:Name"')
    module = import_user_module(source)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f'{source} has no "{name}"{did_you_mean(name, names)}')
    return getattr(module, name)


def load_function(spec: str, kind: str) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names, to be a reward or `what` it is. UserError where there is none.

    One in a file is looked for once; what was given may be another of the same name the next time.
    """
    found = load_object(spec) if spec.startswith(IN_PROCESS_PREFIX) else load_object_cached(spec)
    if not callable(found):
        raise UserError(f'{kind} "{spec}" is a {type(found).__name__}: name a function')
    return found


@cache
def load_object_cached(spec: str) -> Any:
    return load_object(spec)


def import_user_module(source: str) -> ModuleType:
    name = resolve_module_name(Path(source)) if source.endswith(".py") else source
    try:
        module = importlib.import_module(name)
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        file = f"{source}.py"
        hint = f'; a file is named with its ending, "{file}:Name"' if Path(file).is_file() else ""
        raise UserError(f"{source} cannot be imported: {error}{hint}") from error
    except USER_IMPORT_ERRORS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{source} cannot be imported: {what} ({Path(frame.filename).name}, line {frame.lineno})"
        ) from error
    if not name.startswith(PACKAGE_PREFIX) and name not in _module_digests:
        _module_digests[name] = compute_module_digest(module)
    return module


def forget_edited_modules() -> None:
    """From now on files of the user's count as they are: the next to ask for one that was edited has it imported anew.

    What an older version of it has defined lives on where it is in use.
    """
    load_object_cached.cache_clear()
    for name in [
        name for name, digest in _module_digests.items() if compute_module_digest(sys.modules.get(name)) != digest
    ]:
        del _module_digests[name]
        module = sys.modules.pop(name, None)
        with suppress(OSError):  # what Python compiled is kept for another file of its second and its size
            Path(getattr(module, "__cached__", None) or "").unlink()


def compute_module_digest(module: ModuleType | None) -> str:
    """The sha256 of the file of a module as it is now; empty where there is none."""
    try:
        return hashlib.sha256(Path(getattr(module, "__file__", None) or "").read_bytes()).hexdigest()
    except OSError:
        return ""


def resolve_module_name(path: Path) -> str:
    """The name that imports this file, in this process and in those spawned from it, which inherit its sys.path."""
    if not path.expanduser().is_file():
        raise MissingFileError(f"{path}: there is no such file{suggest_path(path)}", path)
    path = path.expanduser().resolve()
    if not path.stem.isidentifier():
        raise UserError(f'{path}: "{path.stem}" is no module name; rename the file to letters, digits and _')
    importlib.invalidate_caches()
    other = find_module_origin(path.stem)
    if other and Path(other).resolve() != path:
        raise UserError(f'{path}: the module name "{path.stem}" is taken by {other}; rename the file')
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return path.stem


def find_module_origin(module: str) -> str | None:
    """The file behind a module that is imported or installed, `built-in` where there is none."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or "built-in"
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.loader is None else spec.origin


def suggest_path(path: Path) -> str:
    """Hint at what there is of a similar name beside a path where there is nothing."""
    close = get_close_matches(path.name, list_sibling_names(path), n=1)
    return f'; did you mean "{path.parent / close[0]}"?' if close else ""


def list_sibling_names(path: Path) -> list[str]:
    """The names in the folder of a path; none where it cannot be read, which is no reason to hide what is wrong."""
    try:
        return [file.name for file in path.parent.iterdir()]
    except OSError:
        return []


def join_mistakes(mistakes: Iterable[str]) -> str:
    """Several mistakes as sentences of one line."""
    return " ".join(mistake if mistake.endswith("?") else f"{mistake}." for mistake in mistakes).removesuffix(".")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Example: did_you_mean("numric", ["numeric", "exact"]) == '; did you mean "numeric"?'"""
    close = get_close_matches(name, list(names), n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


# ---------------------------------------------------------------- extras
# Libraries that only some settings need: `pip install "pellucid[EXTRA]"` brings them.


def import_extra(module: str, extra_name: str, feature: str) -> Any:
    """The module, imported when it is needed. UserError where it is missing, naming `what` needs it and the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]  # torch.utils.tensorboard is there, and lacks tensorboard
        raise UserError(f'{feature} needs {missing}: pip install "pellucid[{extra_name}]"') from error


# ---------------------------------------------------------------- hub
# Whether the Hub is there. Where it is not, its client asks six times for each file, 23 seconds long, before it looks
# into its cache.


CONNECT_TIMEOUT_SECONDS = 10.0
"""Seconds in which a connection must have been made."""


def check_hub_online() -> bool:
    """Whether the Hub may be asked. Where it cannot be reached, say so, once a process, and leave it to its cache."""
    from huggingface_hub import constants  # noqa: PLC0415 - it reads the environment when it is imported

    if not constants.HF_HUB_OFFLINE and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@functools.cache
def is_reachable(endpoint: str) -> bool:
    """Whether somebody answers there, and a line where nobody does. What stands behind a proxy is taken for there."""
    address = urlsplit(endpoint)
    if getproxies().keys() & {address.scheme, "all"}:
        return True
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or error
        text = f"! {endpoint} cannot be reached ({reason}): only what is cached can be loaded"
        print(escape_controls(text), flush=True)
        return False
    return True


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector while torch is imported, and exempt the imported modules from it afterwards.

    The collector would search modules that stay until the process ends, again and again, which takes half as long as
    the import itself. If torch is imported already, this does nothing: the process is another program's.
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
