"""Run a sampler server with `transfer_double.Receiving` and slow transfers: `transfer_process.py PORT PAUSE`."""

from __future__ import annotations

import sys

import torch

from pellucid.serve import middleware
from pellucid.serve.command import open_listening_socket
from pellucid.serve.vllm_server import EngineHost, make_sampler_app
from transfer_double import Receiving

if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_listening_socket("127.0.0.1", int(sys.argv[1])) as free:
        held = EngineHost(lambda model: Receiving(model, pause=float(sys.argv[2])))
        middleware.make_server(make_sampler_app(held, ("localhost",), "")).run(sockets=[free])
