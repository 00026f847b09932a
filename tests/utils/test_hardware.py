"""Measuring leaves the process as it was."""

from __future__ import annotations

import pytest
import torch

from pellucid.utils.hardware import measure_matmul_tflops


def test_a_dtype_that_cannot_be_multiplied_leaves_the_threads(monkeypatch):
    def refused(*_):
        raise RuntimeError("not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", refused)
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="Half"):
        measure_matmul_tflops(torch.float16, threads=before + 1)
    assert torch.get_num_threads() == before
