"""Rows of draft trees on a GPU have the bits of plain decoding, where products group their terms: attention over private pages.

python -m pytest -q -m gpu tests/runtime/kernels_cu/test_tree_paths_gpu.py
"""

from __future__ import annotations

import pytest

from tests.compare import check_bitwise
from tests.runtime.kernels_cu.path_cases import TREES, random_world, world_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    """One for each test: it keeps the memory that it has given until it goes."""
    from runtime.kernels_cu.device import CupyDevice

    return CupyDevice()


@pytest.mark.parametrize("name", TREES)
def test_a_trees_rows_have_the_bits_of_plain_decoding(device, name):
    world_of(device, name).check()


@pytest.mark.parametrize("heads", [5, 8, 64])
@pytest.mark.parametrize("page", [16, 24, 64])
@pytest.mark.parametrize("seed", range(4))
def test_random_trees(device, page, heads, seed):
    """Pages of 24 are for mma.sync, the others for wgmma where there is one; 8 and 64 heads take other kernels."""
    world = random_world(device, page, seed, longest=1500, heads=heads)
    world.check()
    together = world.attend(world.plan)
    for row in {0, world.plan.m // 2, world.plan.m - 1}:
        check_bitwise(world.plain(slice(row, row + 1)), together[:, row : row + 1], f"row {row} alone")


def test_mutation_keys_at_node_positions_have_other_bits(device):
    world = world_of(device, "a tile begins inside the path")
    world.ops.paths = None
    with pytest.raises(AssertionError, match="differ"):
        check_bitwise(world.attend(world.plan), world.plain())
