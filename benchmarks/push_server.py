"""A sampler server that only keeps the weights that it gets: `push_server.py --port PORT`, for push-* of gpu.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pellucid.rollout.vllm_client import SECRET_VARIABLE
from pellucid.serve import middleware
from pellucid.serve.command import open_listening_socket
from pellucid.serve.vllm_server import EngineHost, make_sampler_app


class WeightStore:
    """An engine without a model."""

    max_length, block_size, receiver = 2, 1, None

    def __init__(self, _: Any) -> None:
        self.weights: dict[str, Tensor] = {}

    def push(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)

    def abort_all(self) -> None:
        pass

    def close(self) -> None:
        pass


if __name__ == "__main__":
    with open_listening_socket("127.0.0.1", int(sys.argv[2])) as listening:
        app = make_sampler_app(EngineHost(WeightStore), ("localhost",), os.environ[SECRET_VARIABLE])
        middleware.make_server(app).run(sockets=[listening])
