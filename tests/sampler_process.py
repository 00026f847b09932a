"""Run a sampler server without vLLM, whose engine is a model of transformers.

Usage: `python sampler_process.py PORT THREADS [HOST]`.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import EOS, VOCAB, character_tokenizer
from forked import Forked
from pellucid.algorithm.batch import collate
from pellucid.policy.policy import Policy
from pellucid.rollout.vllm import LORA_A_SUFFIX, LORA_B_SUFFIX, EngineAnswer, is_adapter_weight
from pellucid.rollout.vllm_client import SamplerClient, ServerLostError
from pellucid.rollout.weight_check import to_matrix
from pellucid.serve import middleware
from pellucid.serve.command import open_listening_socket
from pellucid.serve.vllm_server import EngineHost, make_sampler_app
from worlds import TEMPLATE


def gaps_of(policy, groups):
    """Return [N] absolute differences between the sampler's and the scorer's log-probs of sampled tokens."""
    batch = collate(groups)
    with torch.no_grad():
        return (policy.score(batch).logprobs - batch.sampler_logprobs)[batch.action_mask].abs()


def gap_of(policy, groups):
    return gaps_of(policy, groups).max()


def tiny_policy(dtype=torch.float32, temperature=1.0, tied=True, seed=0, layers=2):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=EOS,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Policy(LlamaForCausalLM(config), tokenizer, dtype, temperature)


class Plain:
    """Samples one token of each row at a time, with the seed of the row."""

    max_length, block_size = 512, 8
    receiver = None

    def __init__(self, model, pause=0.0):
        self.model = LlamaForCausalLM(LlamaConfig(**model.config)).to(getattr(torch, model.dtype)).eval()
        self.eos_ids, self.pause, self.unfinished, self.rows = model.ends, pause, {}, {}
        self.pushed = 0
        self.seen = []
        """The prompt tokens of all requests."""

    def push(self, weights):
        own = dict(self.model.named_parameters())
        assert own.keys() == weights.keys()
        with torch.no_grad():
            for name, weight in weights.items():
                own[name].copy_(weight)
        self.pushed += 1

    def read_columns(self, name, at):
        return [to_matrix(dict(self.model.named_parameters())[name].detach())[:, at]]

    @torch.no_grad()
    def score_tokens(self, ids):
        logprobs = self.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], 0

    def add_request(self, key, ids, most, temperature, seed):
        self.seen.append(tuple(ids))
        self.unfinished[key] = key
        self.rows[key] = (list(ids), most, temperature, torch.Generator().manual_seed(seed), [], [])

    @torch.no_grad()
    def step(self):
        time.sleep(self.pause)
        ended = []
        for key in list(self.unfinished):
            ids, most, temperature, chance, tokens, logprobs = self.rows[key]
            logits = self.model(torch.tensor([ids + tokens])).logits[0, -1].float()
            spread = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(torch.multinomial(spread.exp(), 1, generator=chance)) if temperature else int(spread.argmax())
            tokens.append(token)
            logprobs.append(float(spread[token]))
            if token in self.eos_ids or len(tokens) == most:
                del self.unfinished[key], self.rows[key]
                ended.append(EngineAnswer(key, tokens, logprobs))
        return ended

    def abort(self, keys):
        for key in keys:
            del self.unfinished[key], self.rows[key]

    def abort_all(self):
        self.unfinished.clear()
        self.rows.clear()

    def close(self):
        pass


class Beside(Plain):
    """Keeps a base and an adapter, and samples with their sum."""

    def __init__(self, model):
        super().__init__(model)
        self.form, self.base, self.adapter = model.adapter, {}, {}
        self.came = []
        """Whether each push contained the base."""

    def push(self, weights):
        adapter = {name: x for name, x in weights.items() if is_adapter_weight(name)}
        base = {name: x for name, x in weights.items() if name not in adapter}
        self.came.append(bool(base))
        self.base, self.adapter = base or self.base, adapter
        added = {
            f"{layer}.weight": adapter[layer + LORA_B_SUFFIX] @ adapter[layer + LORA_A_SUFFIX]
            for layer in (self.form.layers if self.form else {})
        }
        super().push({name: x + added.get(name, 0) for name, x in self.base.items()})

    def read_columns(self, name, at):
        if is_adapter_weight(name):
            return [self.adapter[name][:, at]]
        held = self.base[name]
        return [held[:, at] if held.dim() > 1 else held[:, None]]


@contextmanager
def two(*words, begin=Forked):
    """Yield two servers, started side by side."""
    both = [Process(*words, begin=begin), Process(*words, begin=begin)]
    try:
        for one in both:
            one.wait()
        yield both
    finally:
        for one in both:
            one.kill()


class Process:
    """A server in a separate process, started with the arguments after `python`, in which PORT stands for its port."""

    def __init__(self, *words, begin=Forked):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.words = [port if word == "PORT" else word for word in words]
        self.url = f"http://127.0.0.1:{port}"
        self.begin = begin
        self.process = begin(*self.words)

    def start(self):
        self.process = self.begin(*self.words)
        self.wait()

    def wait(self):
        for _ in range(600):
            try:
                return SamplerClient(self.url, 5.0).get_state()
            except ServerLostError:
                time.sleep(0.1)
        raise AssertionError

    def kill(self):
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()


@contextmanager
def served(held, secret="", port=0):
    """Yield the address of a server in this process."""
    with open_listening_socket("127.0.0.1", port) as free:
        server = middleware.make_server(make_sampler_app(held, ("localhost",), secret))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [free]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{free.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            held.close()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))  # rounds products like the process that compares
    with open_listening_socket([*sys.argv, "127.0.0.1"][3], int(sys.argv[1])) as free:
        held = EngineHost(lambda model: Beside(model) if model.adapter else Plain(model, pause=0.02))
        middleware.make_server(make_sampler_app(held, ("localhost",), "")).run(sockets=[free])
