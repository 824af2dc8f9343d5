"""Norms of blocks: in double precision, whatever the bits of what is read."""

from __future__ import annotations

import math

import pytest
import torch

from naught.block_norms import in_order, norms_in_one_read, norms_of
from naught.holding import STRETCH_NUMEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [1, 4096, STRETCH_NUMEL + 77])
def test_one_read_gives_what_widening_first_gives(numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = values.double().square().sum().item()
    in_blocks = in_order(torch.cat(norms_of(values)).square().tolist())
    at_once = in_order(norms_in_one_read(values).square().tolist())
    assert norms_in_one_read(values).dtype == torch.float64
    assert math.isclose(in_blocks, whole, rel_tol=1e-12)
    assert math.isclose(at_once, whole, rel_tol=1e-12)


def test_there_is_nothing_of_nothing():
    assert norms_of(torch.empty(0)) == []
