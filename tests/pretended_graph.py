"""A CUDA graph without CUDA: the operators of a step, captured once and launched again on the same tensors.

It is as strict as a real one. Nothing is computed during a capture; Python's branches and numbers stay as they were
then; results lie in the same place each time; waiting for the device and copying to it from the host are refused. A
graph keeps none of its inputs alive, and a memory pool cannot be used after its last graph is gone.
"""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from simulated_device import entered

REFUSED = "operation not permitted when stream is capturing"


class Capture(TorchDispatchMode):
    """Computes all the same, as sizes are asked for meanwhile, and takes back at its end what was written."""

    def __init__(self):
        super().__init__()
        self.launched = []
        self.made = {}
        self.written = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, seen = kwargs or {}, asked_of_device()
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write and id(x) not in self.made:
                self.written.append((x, x.clone()))
        result = func(*args, **kwargs)
        if asked_of_device() > seen:
            raise RuntimeError(REFUSED)
        self.launched.append((func, args, kwargs, result))
        self.made |= {id(x): x for x in tensors(result)}
        return result

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for x, before in reversed(self.written):
            x.copy_(before)


def asked_of_device():
    return entered[-1].waits.total() + entered[-1].copies.total() if entered else 0


def tensors(result):
    return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]


class Address:
    """A tensor that a graph uses and does not own. A real graph holds an address, which keeps nothing alive."""

    def __init__(self, x):
        self.tensor = weakref.ref(x)

    def read(self):
        x = self.tensor()
        if x is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return x


def read(x):
    return x.read() if isinstance(x, Address) else x


class Pool:
    """The memory of graphs, counted as CUDACachingAllocator counts it: a pool ends with the last graph that uses it."""

    def __init__(self):
        self.users, self.begun, self.last = 0, False, None

    def enter(self, graph):
        if self.begun and not self.users:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
        self.begun, self.users, self.last = True, self.users + 1, weakref.ref(graph)
        weakref.finalize(graph, self.leave)

    def leave(self):
        self.users -= 1


class CUDAGraph:
    def __init__(self):
        self.launched, self.pool = [], None

    def hold(self, capture, pool):
        """Keep what was captured. Only what was made during the capture belongs to the graph."""

        def held(x):
            return Address(x) if isinstance(x, torch.Tensor) and id(x) not in capture.made else x

        self.pool = pool
        self.launched = [(func, *(tree_map(held, each) for each in launch)) for func, *launch in capture.launched]

    def replay(self):
        if self.pool.last() is not self:
            raise RuntimeError("another graph of the same pool has written over the memory of this one")
        now, made = {}, []

        def current(x):
            x = read(x)
            return now.get(id(x), x) if isinstance(x, torch.Tensor) else x

        for func, args, kwargs, captured in self.launched:
            result = tree_map(read, captured)
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            now |= {id(old): new for old, new in zip(tensors(result), tensors(again), strict=True)}
            made.append((func, result))
        for func, result in made:
            if not any(returned.alias_info for returned in func._schema.returns):
                for old in tensors(result):
                    old.copy_(now[id(old)])


class Graphs:
    """Stands in for torch's graphs, and counts them. `refuse_from`: the number of the first capture that fails."""

    def __init__(self, monkeypatch):
        self.recorded = 0
        self.replayed = 0
        self.refuse_from = math.inf
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new)
        monkeypatch.setattr(torch.cuda, "graph", self.recording)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
        self.streams = ["the default stream"]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.streams[-1])
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams.append)

    def new(self):
        owner = self

        class Counted(CUDAGraph):
            def replay(self):
                owner.replayed += 1
                super().replay()

        return Counted()

    @contextmanager
    def recording(self, graph, pool=None, capture_error_mode="global"):
        """As torch does, leave its own stream only where the capture has ended well."""
        pool = pool or Pool()
        pool.enter(graph)
        self.streams.append("the stream of captures")
        with Capture() as capture:
            yield
        if self.recorded + 1 >= self.refuse_from:
            raise RuntimeError(REFUSED)
        self.streams.append(self.streams[-2])
        graph.hold(capture, pool)
        self.recorded += 1
