"""vLLM in each of several processes: they sample and train the same as one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runs import same_weights

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm
SCRIPT = Path(__file__).parents[1] / "distributed" / "served_engines.py"


def trained(processes, case, folder):
    """Return the parameters that these processes train, each with its own engine."""
    folder.mkdir()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    where |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, SCRIPT, folder, "", case, "replicated=ddp"]
    running = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    assert [process.wait() for process in running] == [0] * processes
    return load_file(folder / f"replicated-{case}.safetensors")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["wide, llama", "wide, adapter, alone", "wide, ahead"])
def test_three_steps_equal_those_of_one_process(case, tmp_path):
    one, two = (trained(processes, case, tmp_path / f"{processes}") for processes in (1, 2))
    assert two["tokens"].tolist() == one["tokens"].tolist()
    # In vLLM, the rounding of a log-prob depends on the other rows. Importance weights pass it on to the gradients.
    norms = [found.pop("grad_norm") for found in (one, two)]
    torch.testing.assert_close(*norms, rtol=1e-4, atol=0)
    same_weights(two, one, 1e-6)
