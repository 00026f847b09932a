"""Run an SGLang server without SGLang, around a model of transformers: `sglang_process.py PORT CONFIG DTYPE`.

Its requests and responses are those of SGLang 0.5.23 (io_struct.py, http_server.py, tokenizer_manager.py,
weight_updater.py, weight_checker.py). It refuses unknown fields.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import io
import json
import pickle
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict
from transformers import LlamaConfig, LlamaForCausalLM

from pellucid.serve import middleware
from pellucid.serve.command import open_listening_socket


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Sampling(Request):
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None


class Generate(Request):
    input_ids: list[int]
    sampling_params: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    token_ids_logprob: list[int] | None = None
    stream: bool = False


class NewVersion(Request):
    new_version: str
    abort_all_requests: bool = True


class FromTensor(Request):
    serialized_named_tensors: list[str]
    flush_cache: bool = True


class Check(Request):
    action: str = "checksum"


class Unpickler(pickle.Unpickler):
    """Allow those globals of SGLang's SafeUnpickler that tensors need."""

    def find_class(self, module, name):
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return torch._utils._rebuild_tensor_v2
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise RuntimeError(f"Blocked unsafe global ({module}.{name})")


class Server:
    """The implementation of a server. Tests break it through its attributes."""

    def __init__(self, config, dtype="float32", deterministic=True, pause=0.0):
        self.model = LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype)).eval()
        self.architectures, self.dtype, self.deterministic, self.pause = (
            ["LlamaForCausalLM"],
            dtype,
            deterministic,
            pause,
        )
        self.dp_size, self.returns_original_logprobs, self.left_out, self.keeps_cache = 1, False, "", False
        self.version, self.is_updating, self.aborted = "default", False, 0
        self.cache = []
        self.seen = []
        self.lock = threading.Lock()

    @torch.no_grad()
    def generate(self, request):
        sampling, ids, epoch = request.sampling_params, request.input_ids, self.aborted
        self.seen.append(tuple(ids))
        with self.lock:
            cached = 0 if request.return_logprob and request.logprob_start_len >= 0 else self.find_cached(ids)
            self.cache.append(ids)
            scores = self.model(torch.tensor([ids])).logits[0].float()
        about = {"id": "x", "prompt_tokens": len(ids), "cached_tokens": cached, "weight_version": self.version}
        if request.return_logprob:
            start, prompt = request.logprob_start_len, scores[:-1].log_softmax(-1)
            told = [[None, ids[0], None], *([float(p[i]), i, None] for p, i in zip(prompt, ids[1:], strict=True))]
            about["input_token_logprobs"] = told if start == 0 else []
        seed = sampling.sampling_seed if self.deterministic else None
        chance = torch.Generator().manual_seed(seed if seed is not None else time.monotonic_ns())
        greedy = sampling.temperature == 0
        tokens, told, others, finish = [], [], [], {"type": "length", "length": sampling.max_new_tokens}
        while len(tokens) < sampling.max_new_tokens:
            time.sleep(self.pause)
            if self.aborted != epoch:
                finish = {"type": "abort", "message": "Abort"}
                break
            with self.lock:
                logits = self.model(torch.tensor([ids + tokens])).logits[0, -1].float()
            spread = (logits / (1.0 if greedy else sampling.temperature)).log_softmax(-1)
            token = int(spread.argmax() if greedy else torch.multinomial(spread.exp(), 1, generator=chance))
            said = logits.log_softmax(-1) if self.returns_original_logprobs else spread
            tokens.append(token)
            told.append([float(said[token]), token, None])
            others.append([[float(said[i]), i, None] for i in request.token_ids_logprob or []])
            if token in (sampling.stop_token_ids or []):
                finish = {"type": "stop", "matched": token}
                break
        about |= {"finish_reason": finish, "completion_tokens": len(tokens)}
        about["weight_version"] = self.version
        if request.return_logprob:
            about["output_token_logprobs"] = told
            if request.token_ids_logprob:
                about["output_token_ids_logprobs"] = others
        return {"text": "", "output_ids": tokens, "meta_info": about}

    def find_cached(self, ids):
        def count(other):
            return next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), len(other))

        return min(max(map(count, self.cache), default=0), len(ids) - 1)

    @torch.no_grad()
    def load(self, weights):
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            if name != self.left_out:
                own[name].copy_(weight)

    @torch.no_grad()
    def reset(self):
        for p in self.model.parameters():
            p.copy_(torch.rand(p.shape))

    def checksums(self):
        def hashed(p):
            return hashlib.sha256(p.detach().contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:16]

        return {name: hashed(p) for name, p in self.model.named_parameters()}


def make_app(server):
    app = FastAPI()

    def done(message="Success."):
        return {"success": True, "message": message}

    def failed(message):
        return JSONResponse({"success": False, "message": message}, 400)

    @app.get("/server_info")
    def server_info():
        limits = {"max_req_input_len": 506, "max_total_num_tokens": 4096, "page_size": 1}
        sizes = {"tp_size": 1, "dp_size": server.dp_size}
        return {**limits, **sizes, "dtype": server.dtype, "enable_deterministic_inference": server.deterministic}

    @app.get("/model_info")
    def model_info():
        return {"weight_version": server.version, "architectures": server.architectures, "is_generation": True}

    @app.get("/health_generate")
    def health():
        return PlainTextResponse("")

    @app.post("/generate")
    def generate(request: Generate):
        return server.generate(request)

    @app.post("/update_weight_version")
    def update_version(request: NewVersion):
        server.aborted += request.abort_all_requests
        server.version = request.new_version
        return {**done(), "new_version": server.version}

    @app.post("/weights_checker")
    def check(request: Check):
        if request.action == "reset_tensors":
            with server.lock:
                server.reset()
            return done()
        sums = server.checksums()
        return {**done(), "ranks": [{"checksums": sums, "per_gpu_checksum": "", "parallelism_info": []}]}

    @app.post("/begin_weight_update")
    def begin(request: dict[str, Any]):
        if server.is_updating:
            return failed("a weight-update session is already open; call end_weight_update() first")
        server.is_updating = True
        return done()

    @app.post("/update_weights_from_tensor")
    def from_tensor(request: FromTensor):
        if not server.is_updating:
            return failed("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        [one] = request.serialized_named_tensors
        with server.lock:
            server.load(Unpickler(io.BytesIO(base64.b64decode(one, validate=True))).load())
        return done()

    @app.post("/end_weight_update")
    def end(request: dict[str, Any]):
        if not server.is_updating:
            return failed("no weight-update session is open; call begin_weight_update() first")
        server.is_updating = False
        return done()

    @app.post("/flush_cache")
    def flush(timeout: float = 0.0):
        server.cache = server.cache if server.keeps_cache else []
        return PlainTextResponse("Cache flushed.\n")

    return app


@contextmanager
def served(server):
    """Yield the address of a server in this process."""
    with open_listening_socket("127.0.0.1", 0) as free:
        running = middleware.make_server(make_app(server))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [free]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            running.should_exit = True
            thread.join()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_listening_socket("127.0.0.1", int(sys.argv[1])) as free:
        config = json.loads(Path(sys.argv[2]).read_text())
        server = Server(config, sys.argv[3], pause=0.02)
        middleware.make_server(make_app(server)).run(sockets=[free])
