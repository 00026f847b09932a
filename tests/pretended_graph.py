"""A CUDA graph without CUDA: what a step launches, written down once and launched again on the same tensors.

As in a real one, nothing is computed while it is written down; Python's branches and numbers stay what they were then;
what it makes lies in the same place each time; and to wait for the device meanwhile, or to copy to it from the host, is
refused.
"""

from __future__ import annotations

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


class CUDAGraph:
    def __init__(self):
        self.launched = []

    def replay(self):
        now = {}

        def current(x):
            return now.get(id(x), x) if isinstance(x, torch.Tensor) else x

        for func, args, kwargs, result in self.launched:
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            now |= {id(old): new for old, new in zip(tensors(result), tensors(again), strict=True)}
        for func, _, _, result in self.launched:
            if not any(returned.alias_info for returned in func._schema.returns):
                for old in tensors(result):
                    old.copy_(now[id(old)])


class Graphs:
    """Put in place of torch's, and how many there were."""

    def __init__(self, monkeypatch):
        self.recorded = 0
        self.replayed = 0
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new)
        monkeypatch.setattr(torch.cuda, "graph", self.recording)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)

    def new(self):
        graph = CUDAGraph()
        replay = graph.replay

        def counted():
            self.replayed += 1
            replay()

        graph.replay = counted
        return graph

    @contextmanager
    def recording(self, graph, pool, capture_error_mode):
        with Capture() as capture:
            yield
        graph.launched = capture.launched
        self.recorded += 1
