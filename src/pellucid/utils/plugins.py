"""Loads user objects by name ("path/to/file.py:Name"), imports optional libraries, and checks the Hub."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from pellucid.types import MissingFileError, UserError
from pellucid.utils.endpoint import try_connection
from pellucid.utils.text import format_one_line, is_caller_python, print_notes

# ---------------------------------------------------------------- objects by name

IN_PROCESS_PREFIX = "here:"
"""The prefix of names of objects that were given to `pellucid.train`; no other process can find them."""
_PACKAGE_PREFIX = "pellucid."
_in_process_objects: ContextVar[Mapping[str, Any]] = ContextVar("given")
_module_digests: dict[str, str] = {}
"""The digests of the user's files at their first import in this process, by module name."""


class ObjectNotInProcessError(UserError):
    """An object that was given to `pellucid.train` is loaded in another process."""


@contextmanager
def provide_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Make objects loadable by their names, "here:NAME", within the block."""
    token = _in_process_objects.set(objects)
    try:
        yield
    finally:
        _in_process_objects.reset(token)


def load_object(spec: str, kind: str = "object") -> Any:
    """Load an object, or raise UserError.

    Args:
        spec: "module:Name", "path/to/file.py:Name", or "here:Name" for an object that was given to `pellucid.train`.
        kind: The keyword of `pellucid.train` that takes the object, for an error message.
    """
    source, _, name = spec.rpartition(":")
    if spec.startswith(IN_PROCESS_PREFIX):
        objects = _in_process_objects.get({})
        if spec not in objects:
            raise ObjectNotInProcessError(_describe_missing_object(kind, name, objects))
        return objects[spec]
    if not name or not (source.endswith(".py") or all(part.isidentifier() for part in source.split("."))):
        raise UserError(f'"{spec}" names no object: write "path/to/file.py:Name" or "module:Name"')
    module = _import_user_module(source)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f'{source} has no "{name}"{did_you_mean(name, names)}')
    return getattr(module, name)


def _describe_missing_object(kind: str, name: str, objects: Iterable[str]) -> str:
    """Describe an object of a run that this process does not have; `objects` are the names of those that it has."""
    noun, found = "object" if kind in ("task", "object") else "function", f"this run's {kind} `{name}`"
    if not is_caller_python():
        call = f'pellucid.train(resume="RUN", {kind}=...)'
        return f"{found} is a Python {noun}, which commands cannot load: go on with the run in Python, {call}"
    others = ", ".join(f"`{each.removeprefix(IN_PROCESS_PREFIX)}`" for each in objects)
    return f"{found} is a Python {noun}: pass it again, {kind}=..." + (f"; now there is {others}" if others else "")


def load_function(spec: str, kind: str) -> Callable[..., Any]:
    """Load a function, or raise a UserError that names its `kind`. Objects from files are cached."""
    # The same "here:" name may stand for another object in the next call.
    loaded = load_object(spec, kind) if spec.startswith(IN_PROCESS_PREFIX) else _load_object_cached(spec)
    if not callable(loaded):
        raise UserError(f'{kind} "{spec}" is a {type(loaded).__name__}: name a function')
    return loaded


_load_object_cached = functools.cache(load_object)


def _import_user_module(source: str) -> ModuleType:
    """Import a module, by its name or by the path of its file. Raises UserError if that fails."""
    name = _resolve_module_name(Path(source)) if source.endswith(".py") else source
    try:
        module = importlib.import_module(name)
    except SyntaxError as error:
        raise UserError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
    except ImportError as error:
        file = f"{source}.py"
        hint = f'; write a file with its suffix, "{file}:Name"' if Path(file).is_file() else ""
        raise UserError(f"{source} cannot be imported: {error}{hint}") from error
    except UserError:
        raise
    except Exception as error:  # a user's file may raise anything while it is imported
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = format_one_line(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{source} cannot be imported: {reason} ({Path(frame.filename).name}, line {frame.lineno})"
        ) from error
    if not name.startswith(_PACKAGE_PREFIX) and name not in _module_digests:
        _module_digests[name] = _compute_module_digest(module)
    return module


def forget_edited_modules() -> None:
    """Make the next load of an object from an edited file import the file again."""
    _load_object_cached.cache_clear()
    for name, digest in list(_module_digests.items()):
        if _compute_module_digest(sys.modules.get(name)) == digest:
            continue
        del _module_digests[name]
        module = sys.modules.pop(name, None)
        with suppress(OSError):  # Python would reuse the bytecode if the new file has the same size and mtime second
            Path(getattr(module, "__cached__", None) or "").unlink()


def _compute_module_digest(module: ModuleType | None) -> str:
    """Return the sha256 of a module's file as it is now; empty if there is no file."""
    try:
        return hashlib.sha256(Path(getattr(module, "__file__", None) or "").read_bytes()).hexdigest()
    except OSError:
        return ""


def _resolve_module_name(path: Path) -> str:
    """Return the module name of a file, and add its folder to sys.path, which spawned processes inherit."""
    if not path.expanduser().is_file():
        raise MissingFileError(f"{path}: there is no such file{suggest_path(path)}", path)
    path = path.expanduser().resolve()
    if not path.stem.isidentifier():
        raise UserError(f'{path}: "{path.stem}" is not a module name; rename the file to letters, digits and _')
    importlib.invalidate_caches()
    other = _find_module_origin(path.stem)
    if other and Path(other).resolve() != path:
        raise UserError(f'{path}: the module name "{path.stem}" is taken by {other}; rename the file')
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return path.stem


def _find_module_origin(module: str) -> str | None:
    """Return the file of a module that is imported or installed, "built-in" if it has none; None if not found."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or "built-in"
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.loader is None else spec.origin


def suggest_path(path: Path) -> str:
    """Return a hint at a file of a similar name in the folder of a path; empty if there is none."""
    with suppress(OSError):
        siblings = {file.name: file for file in path.parent.iterdir()}
        return "".join(f'; did you mean "{siblings[name]}"?' for name in get_close_matches(path.name, siblings, n=1))
    return ""


def join_mistakes(mistakes: Iterable[str]) -> str:
    """Join several mistakes as sentences in one line."""
    return " ".join(mistake if mistake.endswith("?") else f"{mistake}." for mistake in mistakes).removesuffix(".")


_MIN_SIMILARITY = 0.61
"""At difflib's 0.6, "every" would be similar to "level"."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint at a similar name: did_you_mean("numric", ["numeric", "exact"]) == '; did you mean "numeric"?'"""
    close = get_close_matches(name, list(names), n=1, cutoff=_MIN_SIMILARITY)
    return f'; did you mean "{close[0]}"?' if close else ""


# ---------------------------------------------------------------- optional libraries


def import_extra(module: str, extra_name: str, feature: str) -> Any:
    """Import a library that only some settings need. If it is missing, raise a UserError that names `feature`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = (error.name or module).partition(".")[0]
        raise UserError(f'{feature} needs {missing}: pip install "pellucid[{extra_name}]"') from error


# ---------------------------------------------------------------- the Hub
# If the Hub cannot be reached, its client tries six times for each file, for 23 seconds, before it uses its cache.


CONNECT_TIMEOUT_SECONDS = 10.0


def check_hub_online() -> bool:
    """Return whether the Hub can be used. If not, print that once, and make its client use only the cache."""
    from huggingface_hub import constants  # noqa: PLC0415 - it reads the environment when it is imported

    if not constants.HF_HUB_OFFLINE and not is_reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


@functools.cache
def is_reachable(endpoint: str) -> bool:
    """Return whether a connection is possible, and print a line if not. Behind a proxy the answer is True."""
    if getproxies().keys() & {urlsplit(endpoint).scheme, "all"}:
        return True
    try:
        try_connection(endpoint, CONNECT_TIMEOUT_SECONDS)
    except OSError as error:
        print_notes(f"{endpoint} cannot be reached ({error.strerror or error}): only cached files can be loaded")
        return False
    return True


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector while torch is imported, then exempt torch's objects: a third of the time is saved.

    Do nothing if torch is imported already, since the process then belongs to another program.
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
