import pytest
import torch

from coneheads.geometry import hyperboloid, klein
from coneheads.geometry.aggregation import einstein_midpoint
from tests.geometry.points import all_finite, hyperboloid_points, lorentz_boost, uniform


def _points(count=7, d=3):
    return hyperboloid.to_klein(hyperboloid_points(uniform(count, high=3.0), d))


def test_midpoint_of_equal_points_is_the_point():
    point = _points(1)
    midpoint = einstein_midpoint(point.expand(5, 3), uniform(4, 5))
    torch.testing.assert_close(midpoint, point.expand(4, 3))


def test_midpoint_of_two_points_is_equally_far_from_both():
    points = _points(2)
    midpoint = einstein_midpoint(points, torch.ones(1, 2, dtype=torch.float64))
    to_first, to_second = klein.distance(midpoint, points)
    torch.testing.assert_close(to_first, to_second)
    torch.testing.assert_close(to_first + to_second, klein.distance(*points))


@pytest.mark.parametrize("rapidity", [0.0, 0.7, 2.0])
def test_midpoint_moves_with_every_isometry(rapidity):
    points, weights = _points(), uniform(4, 7)
    boost = lorentz_boost(3, rapidity)

    def move(p):
        return hyperboloid.to_klein(klein.to_hyperboloid(p) @ boost.T)

    torch.testing.assert_close(
        einstein_midpoint(move(points), weights),
        move(einstein_midpoint(points, weights)),
        rtol=1e-10,
        atol=1e-12,
    )


def test_midpoint_does_not_depend_on_the_sum_of_the_weights():
    points, weights = _points(), uniform(4, 7)
    torch.testing.assert_close(einstein_midpoint(points, weights), einstein_midpoint(points, 10 * weights))


def test_row_of_zero_weights_gives_the_centre_with_finite_gradients():
    points, weights = _points().requires_grad_(), torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    midpoint = einstein_midpoint(points, weights)
    assert (midpoint == 0).all()
    assert all_finite(*torch.autograd.grad(midpoint.sum(), (points, weights)))


def test_midpoint_takes_batches_and_passes_gradcheck():
    points = _points(6).view(2, 3, 3).requires_grad_()
    weights = uniform(2, 4, 3).requires_grad_()
    assert einstein_midpoint(points, weights).shape == (2, 4, 3)
    assert torch.autograd.gradcheck(einstein_midpoint, (points, weights))
