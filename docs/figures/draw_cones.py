"""Draws four_cones.png for docs/math.md: the four shadow cones, two points and their lowest common ancestor.

Every shadow is what `precedes` says over a grid of points, so the figure shows the code and not an artist's idea of it.
"""

import argparse
import math
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from torch import Tensor

from coneheads.geometry import poincare_ball
from coneheads.geometry.hyperboloid import to_poincare_ball
from coneheads.geometry.shadow_cones import (
    FinitePenumbralCone,
    FiniteUmbralCone,
    PenumbralCone,
    ShadowCone,
    UmbralCone,
)

LIGHT, ANCESTOR, POINT = "#ffd54a", "#c9d6e8", "#5b7fb4"
GRID = 700


def shade(axes: Axes, cone: ShadowCone, apex: Tensor, plane: Tensor, points: Tensor, colour: str) -> None:
    """Fills the points of the plane that the apex precedes. plane [GRID, GRID, 2]; points: it in the cone's model."""
    inside = cone.precedes(apex, points) & ~points.isnan().any(-1)
    x, y = plane.numpy().transpose(2, 0, 1)
    axes.contourf(x, y, inside.double().numpy(), levels=[0.5, 1.5], colors=[colour], antialiased=True)


def mark(axes: Axes, place: Tensor, name: str, offset: tuple[float, float]) -> None:
    axes.plot(*place.tolist(), "o", color="black", markersize=5, zorder=4)
    axes.annotate(name, place.tolist(), xytext=offset, textcoords="offset points", fontsize=12, zorder=5)


def half_plane(axes: Axes, cone: ShadowCone, u: Tensor, v: Tensor, top: float) -> None:
    """The cones whose light is above; points are (x, height)."""
    side = 0.75 * top
    x, y = torch.linspace(-side, side, GRID), torch.linspace(1e-4, top, GRID)
    plane = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)
    lca = cone.lca(u, v)
    for apex, colour in ((lca, ANCESTOR), (u, POINT), (v, POINT)):
        shade(axes, cone, apex, plane, plane, colour)
    for place, name, offset in (
        (u, "u", (-30, 4)),
        (v, "v", (30, 4)),
        (lca, "lca(u, v)", (62 if isinstance(cone, UmbralCone) else 12, 4)),
    ):
        mark(axes, place, name, offset)
        if isinstance(cone, UmbralCone):
            x0, y0 = place.tolist()
            centre, radius = (x0, y0 * math.cosh(cone.radius)), y0 * math.sinh(cone.radius)
            axes.add_patch(Circle(centre, radius, fill=False, color="black", linewidth=1))
    axes.axhline(0, color="black", linewidth=2)
    axes.set(xlim=(-side, side), ylim=(-0.02 * top, top), aspect="equal")
    axes.axis("off")


def disc(axes: Axes, cone: ShadowCone, u: Tensor, v: Tensor) -> None:
    """The cones whose light is at the centre of the Poincare disc; points are on the hyperboloid."""
    x = torch.linspace(-1, 1, GRID)
    plane = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1)
    inside = plane.norm(dim=-1, keepdim=True) < 0.9999
    points = torch.where(inside, poincare_ball.to_hyperboloid(torch.where(inside, plane, 0)), math.nan)
    lca = cone.lca(u, v)
    for apex, colour in ((lca, ANCESTOR), (u, POINT), (v, POINT)):
        shade(axes, cone, apex, plane, points, colour)
    for point, name, offset in ((u, "u", (-26, 0)), (v, "v", (18, 0)), (lca, "lca(u, v)", (30, -8))):
        place = to_poincare_ball(point)
        mark(axes, place, name, offset)
        if isinstance(cone, FiniteUmbralCone):
            rho = 2 * math.atanh(place.norm().item())
            near, far = math.tanh((rho - cone.radius) / 2), math.tanh((rho + cone.radius) / 2)
            centre = (place / place.norm() * (near + far) / 2).tolist()
            axes.add_patch(Circle(centre, (far - near) / 2, fill=False, color="black", linewidth=1))
    axes.add_patch(Circle((0, 0), 1, fill=False, color="black", linewidth=2))
    axes.set(xlim=(-1.02, 1.02), ylim=(-0.5, 1.02), aspect="equal")
    axes.axis("off")


def on_hyperboloid(degrees: float, rho: float) -> Tensor:
    angle = math.radians(degrees)
    return torch.tensor([math.cos(angle) * math.sinh(rho), math.sin(angle) * math.sinh(rho), math.cosh(rho)])


def draw() -> Figure:
    figure = Figure(figsize=(10, 7.6), layout="constrained")
    (penumbral, umbral), (finite_penumbral, finite_umbral) = figure.subplots(2, 2)

    half_plane(penumbral, PenumbralCone(light_height=1.0), torch.tensor([-0.4, 0.3]), torch.tensor([0.3, 0.45]), 1.3)
    penumbral.axhspan(1.0, 1.3, color=LIGHT)
    penumbral.text(0, 1.15, "light: everything above height h", ha="center", va="center", fontsize=11)
    penumbral.set_title("penumbral, infinite: a horosphere of light")

    half_plane(umbral, UmbralCone(radius=0.45), torch.tensor([-0.42, 0.25]), torch.tensor([0.25, 0.5]), 2.0)
    umbral.axhspan(1.78, 2.0, color=LIGHT)
    umbral.text(0, 1.89, "light: at height infinity", ha="center", va="center", fontsize=11)
    for x in (-1.2, -0.8, 0.8, 1.2):
        arrow = {"arrowstyle": "->", "color": "#d9a400", "linewidth": 2}
        umbral.annotate("", (x, 1.45), (x, 1.78), arrowprops=arrow)
    umbral.set_title("umbral, infinite: balls of radius r, light from above")

    disc(finite_penumbral, FinitePenumbralCone(light_radius=0.5), on_hyperboloid(120, 1.9), on_hyperboloid(65, 1.6))
    finite_penumbral.add_patch(Circle((0, 0), math.tanh(0.25), color=LIGHT, zorder=3))
    finite_penumbral.text(0, -0.33, "light: a ball of radius R", ha="center", fontsize=11)
    finite_penumbral.set_title("penumbral, finite: a ball of light")

    disc(finite_umbral, FiniteUmbralCone(radius=0.25), on_hyperboloid(120, 1.9), on_hyperboloid(65, 1.6))
    finite_umbral.plot(0, 0, "o", color=LIGHT, markersize=10, markeredgecolor="#d9a400", zorder=3)
    finite_umbral.text(0, -0.17, "light: one point", ha="center", fontsize=11)
    finite_umbral.set_title("umbral, finite: balls of radius r, a point of light")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "four_cones.png")
    out = parser.parse_args().out
    draw().savefig(out, dpi=100)
    print(f"Picture: {out}")
