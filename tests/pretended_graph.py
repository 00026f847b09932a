"""Simulate CUDA graphs without CUDA: the operators of a step are captured once and launched again on the same tensors.

The simulation is as strict as CUDA. Nothing is computed during a capture, Python's branches and numbers stay as they
were then, and results are in the same memory each time. These are refused: waiting for the device, copying to it from
the host, and kernels that never ran before. A graph keeps none of its inputs alive, and a memory pool cannot be used
after its last graph is freed. A step is captured a second time one token later, which finds numbers of the host that
differ then, even if they do not change the logits.
"""

from __future__ import annotations

import math
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pellucid.models import cuda_graphs
from simulated_device import DeviceTensor, active_devices, get_signature, launches_kernel, list_tensors

REFUSED = "operation not permitted when stream is capturing"


class Capture(TorchDispatchMode):
    """Compute during the capture, because sizes are needed, and undo all writes at its end."""

    def __init__(self):
        super().__init__()
        self.device = active_devices[-1] if active_devices else None
        self.launched = []
        """(operator, args, kwargs, result) in order."""
        self.results = {}
        """All tensors that the capture made, by their id."""
        self.overwritten = []
        """Other tensors that the capture wrote to, and their previous values."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __enter__(self):
        if self.device:
            self.device.capture = self
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, before = kwargs or {}, self.count_host_work()
        for argument in func._schema.arguments:
            if argument.alias_info and argument.alias_info.is_write:
                x = kwargs[argument.name] if argument.name in kwargs else args[func._schema.arguments.index(argument)]
                if id(x) not in self.results:
                    self.overwritten.append((x, x.clone()))
        result = func(*args, **kwargs)
        if self.count_host_work() > before:
            raise RuntimeError(REFUSED)
        if self.device and launches_kernel(func, result):
            tensors = list_tensors(args, kwargs)
            on_device = any(isinstance(x, DeviceTensor) for x in (*tensors, result))
            if on_device and get_signature(func, tensors) not in self.device.signatures:
                raise RuntimeError(f"{REFUSED}: the first call of {func}")
        self.launched.append((func, args, kwargs, result))
        self.results |= {id(x): x for x in flatten_tensors(result)}
        return result

    def add_launch(self, kernel, arguments):
        """Record a Triton kernel without computing it, because it may write to an address."""
        if get_signature(kernel.name, list_tensors(arguments, {})) not in self.device.signatures:
            raise RuntimeError(f"{REFUSED}: the first call of {kernel.name}")
        self.launched.append((Relaunch(kernel), arguments, {}, None))

    def __exit__(self, *exception):
        super().__exit__(*exception)
        for x, before in reversed(self.overwritten):
            copy_values(x, before)
        if self.device:
            self.device.capture = None

    def count_host_work(self):
        return self.device.waits.total() + self.device.copies.total() if self.device else 0

    def describe(self, inputs):
        """Return each launch: its operator, its numbers, and the shape, layout and address of its tensors.

        Tensors that the capture made and these inputs have no address, because theirs differs in each capture.
        """
        new = [x for func, *_, result in self.launched if returns_new_memory(func) for x in flatten_tensors(result)]
        made = {*map(get_address, (*new, *inputs))}

        def describe_one(x):
            if not isinstance(x, torch.Tensor):
                return x
            address = get_address(x)
            return x.dtype, x.shape, x.stride(), None if address in made else address

        return [(str(func), *tree_map(describe_one, (args, kwargs))) for func, args, kwargs, _ in self.launched]


class Relaunch:
    """A Triton kernel in a graph."""

    _schema = SimpleNamespace(arguments=(), returns=())

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *arguments):
        active_devices[-1].launch(self.kernel, arguments)

    def __str__(self):
        return str(self.kernel)


def flatten_tensors(result):
    return [x for x in tree_flatten(result)[0] if isinstance(x, torch.Tensor)]


def returns_new_memory(func):
    return not any(returned.alias_info for returned in func._schema.returns)


def get_address(x):
    return getattr(x, "cpu_data", x).untyped_storage().data_ptr()


def copy_values(target, source):
    """Copy between tensors of one device without launching a kernel."""
    getattr(target, "cpu_data", target).copy_(getattr(source, "cpu_data", source))


def ignore_memory():
    """Return a context in which tensors take no memory, because a graph computes in that of its capture."""
    return active_devices[-1].memory.ignore() if active_devices else nullcontext()


class Address:
    """A tensor that a graph uses but does not own. A real graph holds an address, which keeps nothing alive."""

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
    """The memory of graphs, counted as in CUDACachingAllocator: a pool ends with the last graph that uses it."""

    def __init__(self):
        self.users, self.was_used, self.last = 0, False, None

    def enter(self, graph):
        if self.was_used and not self.users:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
        self.was_used, self.users, self.last = True, self.users + 1, weakref.ref(graph)
        weakref.finalize(graph, self.leave)

    def leave(self):
        self.users -= 1


class CUDAGraph:
    def __init__(self):
        self.launched, self.pool = [], None

    def keep(self, capture, pool):
        """Keep what was captured. Only tensors that were made during the capture belong to the graph."""

        def weaken(x):
            return Address(x) if isinstance(x, torch.Tensor) and id(x) not in capture.results else x

        self.pool = pool
        self.launched = [(func, *(tree_map(weaken, each) for each in launch)) for func, *launch in capture.launched]

    def replay(self):
        if self.pool.last() is not self:
            raise RuntimeError("another graph of the same pool has written over the memory of this one")
        new_results, computed = {}, []

        def get_current(x):
            x = read(x)
            return new_results.get(id(x), x) if isinstance(x, torch.Tensor) else x

        with ignore_memory():
            for func, args, kwargs, kept in self.launched:
                captured = tree_map(read, kept)
                result = func(*tree_map(get_current, args), **tree_map(get_current, kwargs))
                pairs = zip(flatten_tensors(captured), flatten_tensors(result), strict=True)
                new_results |= {id(old): new for old, new in pairs}
                computed.append((func, captured))
        for func, captured in computed:
            if returns_new_memory(func):
                for old in flatten_tensors(captured):
                    copy_values(old, new_results[id(old)])


class Graphs:
    """Replace torch's graphs, and count them. `refuse_from` is the number of the first capture that fails."""

    def __init__(self, monkeypatch):
        self.captured = 0
        self.replayed = 0
        self.compared = 0
        """Steps that were captured a second time."""
        self.refuse_from = math.inf
        self.last_launches = []
        """The description of the last capture."""
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.create_graph)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
        self.streams = ["the default stream"]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.streams[-1])
        monkeypatch.setattr(torch.cuda, "set_stream", self.streams.append)
        self.capture_step = cuda_graphs.capture_step
        monkeypatch.setattr(cuda_graphs, "capture_step", self.capture_step_twice)

    def create_graph(self):
        owner = self

        class CountedGraph(CUDAGraph):
            def replay(self):
                owner.replayed += 1
                super().replay()

        return CountedGraph()

    @contextmanager
    def capture(self, graph, pool=None, capture_error_mode="global"):
        """Capture a graph. Like torch, leave the capture's stream only if the capture succeeded."""
        pool = pool or Pool()
        pool.enter(graph)
        self.streams.append("the stream of captures")
        with Capture() as capture:
            yield
        if self.captured + 1 >= self.refuse_from:
            raise RuntimeError(REFUSED)
        self.streams.append(self.streams[-2])
        graph.keep(capture, pool)
        self.captured += 1
        self.last_launches = capture.describe(())

    def capture_step_twice(self, step, *inputs):
        """Replace cuda_graphs.capture_step. The second capture precedes the second replay."""
        replay, replays = self.capture_step(step, *inputs), 0
        first, weak_step = self.last_launches, weakref.WeakMethod(step)

        def replay_checked(*inputs):
            nonlocal replays
            replays += 1
            if replays == 2:
                with ignore_memory(), Capture() as again:
                    weak_step()(*inputs)
                check_same_launches(first, again.describe(inputs))
                self.compared += 1
            return replay(*inputs)

        return replay_checked


def check_same_launches(first, second):
    """Raise AssertionError if two captures of a step launch different operators, numbers or tensors."""
    for one, other in zip(first, second, strict=False):
        if not match(one, other):
            raise AssertionError(f"a graph keeps what changes from step to step: {one}, then {other}")
    assert len(first) == len(second), f"{len(first)} operators, then {len(second)}"


def match(one, other):
    """Return whether two launches are the same. A tensor of the second without address is an input, and matches any."""
    (ones, spec), (others, other_spec) = tree_flatten(one), tree_flatten(other)
    if spec != other_spec or len(ones) != len(others):
        return False
    return all(x == y or y is None for x, y in zip(ones, others, strict=True))
