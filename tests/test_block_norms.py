"""Norms of blocks: in double precision, whatever the bits of what is read."""

from __future__ import annotations

import math

import pytest
import torch
from menagerie import DEVICE

from naught.block_norms import in_order, norms_in_one_read, norms_of, norms_of_each
from naught.rooms import STRETCH_NUMEL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [1, 4096, STRETCH_NUMEL + 77])
def test_one_read_gives_what_widening_first_gives(numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    whole = values.double().square().sum().item()
    in_blocks = in_order(torch.cat(norms_of(values)).square().tolist())
    (read,) = norms_in_one_read([values])
    at_once = in_order(read.square().tolist())
    assert read.dtype == torch.float64
    assert math.isclose(in_blocks, whole, rel_tol=1e-12)
    assert math.isclose(at_once, whole, rel_tol=1e-12)


def test_there_is_nothing_of_nothing():
    assert norms_of(torch.empty(0)) == []


@pytest.mark.parametrize("one_read", [False, True], ids=["as devices do", "in one read"])
def test_company_changes_no_norm(one_read):
    """Of different lengths and types, some empty: each as if it were alone."""
    dice = torch.Generator().manual_seed(7)
    numels = [3, 0, STRETCH_NUMEL + 77, 4096, 0, 2 * STRETCH_NUMEL]
    types = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    many = [torch.randn(numel, generator=dice).to(DEVICE, dtype) for numel, dtype in zip(numels, types, strict=True)]
    if one_read:
        alike = [values for values in many if values.dtype == torch.bfloat16 and values.numel()]
        together, alone = list(norms_in_one_read(alike)), [norms_in_one_read([values])[0] for values in alike]
    else:
        together = [torch.cat(norms) for norms in norms_of_each(many) if norms]
        alone = [torch.cat(norms) for values in many if (norms := norms_of(values))]
    assert [norms.tolist() for norms in together] == [norms.tolist() for norms in alone]
    assert len(alone) == (3 if one_read else 4)
