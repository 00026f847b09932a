"""Run a real server of a tiny random model on the loopback interface, with helpers for clients."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from conftest import make_policy
from pellucid.policy.policy import Policy
from pellucid.serve import middleware
from pellucid.serve.api import make_app
from pellucid.serve.command import open_listening_socket
from pellucid.serve.daemon import make_url
from pellucid.serve.engine import ServedModel, ServingEngine

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


PLACES = 512


def saying_tokens(tokenizer, asked, ids):
    """Return a GPT-2 that answers the prompt `asked` with `ids`: its output depends only on the position."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=PLACES, n_layer=1, n_head=1, n_positions=PLACES, tie_word_embeddings=False
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.eye(PLACES) if "wpe" in name else torch.ones_like(p) if "ln_" in name else p * 0)
            if "ln_" in name and "bias" in name:
                p.zero_()
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    for i, token in enumerate(ids):
        model.lm_head.weight.data[token, len(asked) - 1 + i] = 10.0
    return Policy(model, tokenizer)


@contextmanager
def running(patience=10.0, grace=10.0, **changes):
    """Yield a service of a tiny random model and its address. `served.stop` does what a signal does."""
    policy = changes.pop("policy", None) or make_policy("llama")
    policy.tokenizer.chat_template = policy.tokenizer.chat_template or TEMPLATE
    rows, waiting = changes.pop("rows", 16), changes.pop("waiting", 64)
    served = replace(ServedModel("tiny", policy, ServingEngine(policy, rows, waiting), max_tokens=24), **changes)
    server, socket = middleware.make_server(make_app(served), patience, grace), open_listening_socket("127.0.0.1", 0)
    object.__setattr__(
        served, "stop", lambda: middleware.make_stop_handler(server, served.engine.close, grace)(15, None)
    )
    threads = [
        threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True),
        threading.Thread(target=served.engine.run, daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield served, make_url(*socket.getsockname())
    finally:
        server.should_exit = True
        served.engine.close()
        for thread in threads:
            thread.join(20)


def request(url, body=None, raw=None, headers=(), seconds=30):
    """Return status and parsed answer of a POST, or of a GET if there is no body."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **dict(headers)})
    try:
        with urllib.request.urlopen(asked, timeout=seconds) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def post(url, body, raw=None):
    return request(url, body, raw)


def chat(text="2+3=", **settings):
    return {"messages": [{"role": "user", "content": text}], **settings}


def wait_until(condition):
    """Wait for a condition. If it never holds, the suite's time limit ends the test."""
    while not condition():
        time.sleep(0.01)
