"""logic.py: Boolean logic at the corners of the unit cube, smooth, bounded and monotone inside it."""
import itertools

import pytest
import torch
from torch.autograd import gradcheck

from logic import and_not, fuzzy_and, fuzzy_not, fuzzy_or

WIDTHS = (1, 2, 3, 5)


def corners(width):
    """All 2^width rows of zeros and ones, and the same as Python booleans."""
    rows = list(itertools.product((False, True), repeat=width))
    return torch.tensor(rows, dtype=torch.float64), rows


def inside(*shape, seed=0):
    """Points of (0,1), away from the ends by 0.05."""
    return 0.05 + 0.9 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize('width', WIDTHS)
def test_truth_tables_of_and_and_or(width):
    x, rows = corners(width)
    assert fuzzy_and(x).tolist() == [all(row) for row in rows]
    assert fuzzy_or(x).tolist() == [any(row) for row in rows]


def test_truth_tables_of_not_and_and_not():
    assert fuzzy_not(torch.tensor([0., 1.])).tolist() == [1, 0]
    x, rows = corners(2)
    assert and_not(x[:, 0], x[:, 1]).tolist() == [a and not b for a, b in rows]


def test_inside_they_are_the_product_and_its_dual():
    a, b, c = inside(3, 200)
    x = torch.stack([a, b, c], dim=-1)
    torch.testing.assert_close(fuzzy_and(x), a * b * c)
    torch.testing.assert_close(fuzzy_or(x[..., :2]), a + b - a * b)
    torch.testing.assert_close(fuzzy_or(x), a + b + c - a * b - a * c - b * c + a * b * c)
    torch.testing.assert_close(and_not(a, b), a - a * b)
    torch.testing.assert_close(fuzzy_not(a) + a, torch.ones_like(a))


@pytest.mark.parametrize('dim', (0, 1, -1))
def test_dim_is_reduced_and_removed(dim):
    x = inside(2, 3, 4)
    for op in (fuzzy_and, fuzzy_or):
        assert op(x, dim).shape == x.select(dim, 0).shape
        torch.testing.assert_close(op(x, dim), op(x.movedim(dim, -1)))


@pytest.mark.parametrize('width', WIDTHS)
def test_de_morgan(width):
    x = inside(200, width)
    torch.testing.assert_close(fuzzy_not(fuzzy_and(x)), fuzzy_or(fuzzy_not(x)))
    torch.testing.assert_close(fuzzy_not(fuzzy_or(x)), fuzzy_and(fuzzy_not(x)))
    torch.testing.assert_close(fuzzy_not(fuzzy_not(x)), x)


@pytest.mark.parametrize('width', WIDTHS)
def test_bounds(width):
    x = inside(500, width)
    smallest, largest = x.amin(-1), x.amax(-1)
    assert (0 < fuzzy_and(x)).all() and (fuzzy_and(x) <= smallest).all()
    rounding = 1e-15                                           # 1 - (1 - a) is a up to rounding
    assert (fuzzy_or(x) < 1).all() and (largest - rounding <= fuzzy_or(x)).all()
    a, b = inside(2, 500)
    assert (0 < and_not(a, b)).all() and (and_not(a, b) <= torch.minimum(a, 1 - b)).all()


def test_monotone_in_each_argument():
    """Raising one operand raises and, or and the first of and_not; it lowers not and the second of and_not."""
    x = inside(500, 3)
    for i in range(3):
        more = x.clone()
        more[:, i] += 0.01
        assert (fuzzy_and(more) > fuzzy_and(x)).all() and (fuzzy_or(more) > fuzzy_or(x)).all()
    a, b, _ = x.unbind(-1)
    assert (fuzzy_not(a + 0.01) < fuzzy_not(a)).all()
    assert (and_not(a + 0.01, b) > and_not(a, b)).all() and (and_not(a, b + 0.01) < and_not(a, b)).all()


@pytest.mark.parametrize('where', ('inside', 'corners'))
def test_gradients_are_finite_differences(where):
    """At the corners too, where a product of three can have two zero factors."""
    x = (inside(6, 3) if where == 'inside' else corners(3)[0]).requires_grad_()
    for op in (fuzzy_and, fuzzy_or, fuzzy_not):
        assert gradcheck(op, (x,))
    assert gradcheck(lambda x: and_not(x[:, 0], x[:, 1]), (x,))
