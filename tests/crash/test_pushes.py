"""Test servers and ranks that are killed during a push: the others continue, or end with one line and can resume."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager

import pytest
import torch
from test_faults import complaint

import sampler_process
from forked import Forked
from runs import launch, same_run
from sampler_process import two

SCRIPT = """
import os
import signal

from pellucid import cli
from pellucid.rollout import vllm_client
from pellucid.rollout.vllm_client import SamplerClient

VICTIM, TIME = os.environ["VICTIM"], int(os.environ["TIME"])
RANK = os.environ["RANK"]
vllm_client.MAX_PART_BYTES = 4000  # some ten parts
request, gather, pushes, gathered = SamplerClient._request, vllm_client.gather_push_weights, [], []


def die(pid):
    os.kill(pid, signal.SIGKILL)


def requested(client, method, path, *arguments, **settings):
    if path.startswith("/weights/") and client.url == os.environ["URL"]:
        _, _, version, part, _ = path.partition("?")[0].split("/")
        if version not in pushes:
            pushes.append(version)
        if len(pushes) == TIME and part == "3":
            if VICTIM == "rank 0":
                die(os.getpid())
            elif VICTIM.isdecimal():
                die(int(VICTIM))
    return request(client, method, path, *arguments, **settings)


def gathering(*arguments):
    gathered.append(None)
    for i, weight in enumerate(gather(*arguments)):
        if len(gathered) == TIME and i == 3 and VICTIM == f"rank {RANK}" != "rank 0":
            die(os.getpid())
        yield weight


SamplerClient._request, vllm_client.gather_push_weights = requested, gathering
if __name__ == "__main__":
    cli.main()
"""
STEPS = ["--evaluate.every", 0, "--checkpoint.every", 1, "--log.no-tensorboard"]


@pytest.fixture(scope="module")
def pair():
    with two(sampler_process.__file__, "PORT", str(torch.get_num_threads())) as both:
        yield both


@pytest.fixture(autouse=True)
def _all_run(pair):
    for one in pair:
        if one.process.poll() is not None:
            one.start()


def served(pair, engine, *more):
    engine, _, stage = engine.partition("/")
    settings = [*STEPS, "--runtime.engine", engine, *(["--runtime.zero-stage", stage] if stage else []), *more]
    return [*settings, "--sampler.name", "vllm", "--sampler.timeout", 5, "--sampler.urls", *(one.url for one in pair)]


@contextmanager
def two_ranks(folder, victim, number, url, *arguments):
    """Start a run whose processes kill a server or themselves in push `number` to this server."""
    (folder / "pushes.py").write_text(SCRIPT)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    where |= {"VICTIM": str(victim), "TIME": str(number), "URL": url}
    processes = []
    for rank in range(2):
        env = {**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"errors-{rank}").open("w") as errors, (folder / f"told-{rank}").open("w") as told:
            command = [folder / "pushes.py", *arguments]
            processes.append(Forked(*command, env=env, stdout=told, stderr=errors))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes, seconds=120):
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < end, [process.poll() for process in processes]
        time.sleep(0.1)
    return [process.wait() for process in processes]


ENGINES = ["ddp", "fsdp2", pytest.param("deepspeed/3", marks=pytest.mark.deepspeed)]


pytestmark = pytest.mark.usefixtures("deepspeed_on_cpus")


@pytest.fixture(scope="module")
def whole(pair, tmp_path_factory):
    """Return a function that gives the uninterrupted run with these settings."""
    made = {}

    def run(recipe, engine, *more):
        if (engine, *more) not in made:
            made[engine, *more] = tmp_path_factory.mktemp("whole") / "run"
            launch(2, recipe, "--run", made[engine, *more], *served(pair, engine, *more))
        return made[engine, *more]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_server_killed_during_a_push_comes_back_without_loss(engine, pair, recipe, tmp_path, whole):
    run_dir, right = tmp_path / "run", whole(recipe, engine, "--sampler.ahead", 0)
    arguments = ["train", recipe, "--run", run_dir, *served(pair, engine)]
    with two_ranks(tmp_path, pair[0].process.pid, 3, pair[0].url, *arguments) as processes:
        assert pair[0].process.wait() != 0
        pair[0].start()
        assert ended(processes) == [0, 0]
    told = (tmp_path / "told-0").read_text()
    assert f"! {pair[0].url}: " in told
    same_run(right, run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("rank", "ahead"), [(0, 0), (1, 0), (0, 1)])
def test_rank_killed_during_a_push_ends_the_others_and_the_run_can_be_resumed(
    rank, ahead, engine, pair, recipe, tmp_path, whole
):
    """Rank 0 is killed while it sends a part of the weights, rank 1 while it takes part in gathering them. The
    checkpoint contains rollouts that ranks have sampled ahead.
    """
    more = ["--sampler.ahead", ahead]
    run_dir, right = tmp_path / "run", whole(recipe, engine, *more)
    arguments = ["train", recipe, "--run", run_dir, *served(pair, engine, *more), "--runtime.timeout", 0.5]
    with two_ranks(tmp_path, f"rank {rank}", 4, pair[0].url, *arguments) as processes:
        statuses = ended(processes)
    assert statuses[rank] == -9
    assert statuses[1 - rank] == 1
    line = complaint((tmp_path / f"errors-{1 - rank}").read_text())
    assert f"(rank {rank})" in line
    assert "--resume" in line
    launch(2, "--resume", run_dir)
    same_run(right, run_dir)
