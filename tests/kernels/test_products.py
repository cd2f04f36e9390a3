"""Matrices times thin factors: every backend equals the reference to the bit, and the true product closely."""

import pytest
import torch

from thinwire import kernels
from thinwire.kernels import reference

SHAPES = [
    (1, 1, 1),
    (3, 5, 2),
    (4, 16, 1),
    (7, 33, 3),
    (17, 64, 4),
    (130, 47, 5),
    (65, 257, 16),
    (8, 1, 1),
    (1, 100, 1),
]


def draw(*shape, seed=0):
    # A slice that begins off any alignment but a float's.
    return torch.randn(shape[0] * shape[1] + 1, generator=torch.Generator().manual_seed(seed))[1:].view(shape)


@pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)
def test_products_equal_the_reference(backend, rows, cols, rank):
    matrix, p, q = draw(rows, cols), draw(rank, rows, seed=1), draw(rank, cols, seed=2)
    made = []
    for module in (reference, backend):
        left, right = torch.full((rank, rows), 9.0), torch.full((rank, cols), 9.0)
        module.times_rows(matrix, q, left)
        module.times_columns(matrix, p, right)
        out, lost, alone = (torch.full((rows, cols), 9.0) for _ in range(3))
        module.outer_product(p, q, out, matrix=matrix, lost=lost)
        module.outer_product(p, q, alone)
        assert torch.equal(out, alone)
        made.append((left, right, out, lost))
    for expected, found in zip(*made, strict=True):
        assert torch.equal(expected, found)
    left, right, out, lost = made[1]
    torch.testing.assert_close(left, q @ matrix.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(right, p @ matrix, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out, p.t() @ q, rtol=1e-4, atol=1e-4)
    assert torch.equal(lost, matrix - out)


@pytest.mark.parametrize(("rows", "cols", "rank"), [*SHAPES, (70, 4500, 2), (130, 2048, 7)])
def test_what_is_owed_is_added_by_the_product(backend, rows, cols, rank):
    """Also where rows are longer than a tile, and where the sum goes past the caches."""
    matrix, owed, q = draw(rows, cols), draw(rows, cols, seed=3), draw(rank, cols, seed=2)
    expected, found, apart = (torch.full((rank, rows), 9.0) for _ in range(3))
    reference.times_rows(matrix + owed, q, expected)
    backend.times_rows(matrix, q, found, owed=owed, total=(total := torch.zeros(rows, cols)))
    assert torch.equal(found, expected) and torch.equal(total, matrix + owed)
    backend.times_rows(matrix, q, apart, owed=owed, total=matrix)
    assert torch.equal(apart, expected) and torch.equal(matrix, total)


def test_what_is_lost_may_take_the_matrix_s_place(backend):
    matrix, p, q = draw(9, 70), draw(3, 9, seed=1), draw(3, 70, seed=2)
    out, apart = torch.zeros(9, 70), torch.zeros(9, 70)
    backend.outer_product(p, q, apart, matrix=matrix, lost=(expected := torch.zeros(9, 70)))
    lost = matrix.clone()
    backend.outer_product(p, q, out, matrix=lost, lost=lost)
    assert torch.equal(lost, expected) and torch.equal(out, apart)
    both = matrix.clone()
    backend.outer_product(p, q, both, matrix=both, lost=(again := torch.zeros(9, 70)))
    assert torch.equal(both, apart) and torch.equal(again, expected)


def test_threads_do_not_show(threads):
    matrix, p, q = draw(1500, 2100), draw(4, 1500, seed=1), draw(4, 2100, seed=2)
    made = []
    for count in (1, 3):
        threads(count)
        left, right, out, lost = (torch.zeros(shape) for shape in ((4, 1500), (4, 2100), (1500, 2100), (1500, 2100)))
        kernels.times_rows(matrix, q, left)
        kernels.times_columns(matrix, p, right)
        kernels.outer_product(p, q, out, matrix=matrix, lost=lost)
        made.append((left, right, out, lost))
    assert all(torch.equal(one, three) for one, three in zip(*made, strict=True))


def test_infinities_and_nans_go_through(backend):
    matrix, q = draw(6, 20), draw(2, 20, seed=1)
    matrix[2, 3] = float("inf")
    out = torch.zeros(2, 6)
    backend.times_rows(matrix, q, out)
    assert out.isfinite().tolist() == [[True, True, False, True, True, True]] * 2


@pytest.mark.parametrize(("change", "message"), [
    ({"matrix": torch.zeros(4)}, "expected a matrix"),
    ({"matrix": torch.zeros(4, 3, dtype=torch.float16)}, "float16"),
    ({"basis": torch.zeros(65, 3)}, r"rank of a factor must be an integer in 1\.\.64"),
    ({"basis": torch.zeros(2, 4)}, r"basis must be contiguous and \(2, 3\)"),
    ({"matrix": torch.zeros(3, 4).t()}, "matrix must be contiguous"),
    ({"out": torch.zeros(2, 4, dtype=torch.float64)}, "out is torch.float64"),
])  # fmt: skip
def test_mistakes_are_named(change, message):
    arguments = {"matrix": torch.zeros(4, 3), "basis": torch.zeros(2, 3), "out": torch.zeros(2, 4)} | change
    with pytest.raises(ValueError, match=message):
        kernels.times_rows(**arguments)
