"""Fakes of NCCL on a CPU, and of vLLM's weight transfer if vLLM is not installed.

`Communicator` broadcasts over gloo and, like NCCL's, waits for a dead peer until it is destroyed. `install` puts a
trainer side like vLLM's into sys.modules. `StandIn` is an LLM with the server side, which checks its requests.
`Receiving` is `sampler_process.Plain` with a `StandIn`.
"""

from __future__ import annotations

import importlib.machinery
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import ModuleType
from typing import NamedTuple

import torch
from torch import distributed

from pellucid.rollout.nccl_transfer import WeightReceiver
from sampler_process import Plain

WEIGHT_TRANSFER = "vllm.distributed.weight_transfer"


KEPT = []
"""Keeps all groups alive. The destructor of a group waits for a pending broadcast and blocks all other threads."""


class Communicator:
    def __init__(self, host, port, rank, size):
        store = distributed.TCPStore(host, port, size, rank == 0, timedelta(seconds=20), use_libuv=False)
        self.group = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        self.store, self.disabled = store, False
        KEPT.append((self.group, store))

    def broadcast(self, tensor, src, stream=None):
        if self.disabled:
            return
        work = self.group.broadcast([tensor], distributed.BroadcastOptions())
        while not work.is_completed():
            if self.disabled:
                return
            time.sleep(0.001)
        try:
            work.wait()
        except RuntimeError:  # gloo notices that the peer is dead, or times out
            while not self.disabled:
                time.sleep(0.01)

    def destroy(self):
        self.disabled = True


# ---------------------------------------------------------------- trainer


@dataclass
class TrainerInfo:
    rank: int
    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int


class Meta(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple


class Trainer:
    """Like vLLM's NCCLTrainerWeightTransferEngine, with one broadcast per weight."""

    def __init__(self, client, source):
        self.client, self.source = client, source

    @classmethod
    def trainer_init(cls, info, *, client, source):
        engine = cls(client, source)
        sent = {"rank_offset": 1, **asdict(info)}
        del sent["rank"]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(client.init_weight_transfer_engine, sent)
            engine.model_update_group = Communicator(info.master_address, info.master_port, 0, info.world_size)
            asked.result()
        return engine

    def send_weights(self):
        meta = self.source.metadata()
        told = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).removeprefix("torch.") for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self.client.start_weight_update()
        pool = ThreadPoolExecutor(1)
        try:
            asked = pool.submit(self.client.update_weights, told)
            group = self.model_update_group
            for (name, weight), m in zip(self.source, meta, strict=True):
                assert (name, weight.dtype, tuple(weight.shape)) == m
                group.broadcast(weight.contiguous(), src=0)
            asked.result()
        finally:
            pool.shutdown(wait=False)
        self.client.finish_weight_update()

    def shutdown(self):
        if self.model_update_group:
            self.model_update_group.destroy()
        self.model_update_group = None


def install(monkeypatch):
    """Behave as if vLLM was installed, with this trainer side."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.distributed", WEIGHT_TRANSFER)}
    modules[f"{WEIGHT_TRANSFER}.nccl_engine"] = engine = ModuleType(f"{WEIGHT_TRANSFER}.nccl_engine")
    modules["vllm"].__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    modules[WEIGHT_TRANSFER].WeightTransferTrainerFactory = Trainer
    modules[WEIGHT_TRANSFER].ParamMeta = Meta
    engine.NCCLTrainerInitInfo = TrainerInfo
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


# ---------------------------------------------------------------- server


class StandIn:
    """An LLM with the weights of a Plain engine. It refuses calls in another order than vLLM requires."""

    def __init__(self, plain, pause=0.0, fault=None):
        self.plain, self.pause, self.fault = plain, pause, fault
        self.model_update_group, self.calls, self.is_updating = None, [], False

    def collective_rpc(self, method):
        self.weight_transfer_engine = self
        return [method(self)]

    def shutdown(self):
        if self.model_update_group:
            self.model_update_group.destroy()

    def shutdown_weight_transfer_engine(self):
        assert not self.is_updating
        self.shutdown()

    def init_weight_transfer_engine(self, request):
        self.calls.append("init")
        if self.fault:
            raise self.fault
        info = request["init_info"]
        assert (info["rank_offset"], info["world_size"]) == (1, 2)
        self.model_update_group = Communicator(info["master_address"], info["master_port"], 1, 2)

    def start_weight_update(self):
        assert not self.is_updating
        self.is_updating = True

    def update_weights(self, request):
        self.calls.append("update")
        assert self.is_updating
        info, group = request["update_info"], self.model_update_group
        own = dict(self.plain.model.named_parameters())
        told = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        weights = {}
        for (name, dtype, shape), (own_name, own_weight) in zip(told, own.items(), strict=True):
            assert (name, dtype, shape) == (own_name, str(own_weight.dtype)[6:], list(own_weight.shape))
            weights[name] = torch.full_like(own_weight, torch.nan).detach()
            group.broadcast(weights[name], src=0)
            time.sleep(self.pause)
        self.plain.push(weights)

    def finish_weight_update(self):
        assert self.is_updating
        self.is_updating = False


class Receiving(Plain):
    """A plain engine that can receive weights."""

    def __init__(self, model, pause=0.0, **stand_in):
        super().__init__(model)
        self.llm = StandIn(self, pause, **stand_in)
        self.receiver = WeightReceiver(self.llm, torch.device("cpu"))

    def receive(self, update_info):
        self.receiver.receive(update_info)
