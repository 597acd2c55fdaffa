"""GradBench's `kmeans`: the cost of a clustering, and a step of Newton's method by the diagonal of its Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import py_engine as pe
from experiments.gradbench.values import Arrays, InputError, array, check_work


def read(given: Any) -> tuple[Arrays, tuple[()]]:
    """The input's points (n, d) and centroids (k, d)."""
    points, centroids = array(given, "points", 2), array(given, "centroids", 2)
    if points.shape[1] != centroids.shape[1] or not len(centroids):
        raise InputError(f"points of shape {points.shape} and centroids of shape {centroids.shape} do not fit")
    check_work(len(points) * centroids.size, f"n={len(points):,} points, {len(centroids):,} centroids")
    return [points, centroids], ()


def cost() -> Callable[..., Any]:
    """The sum of each point's squared distance from the centroid closest to it."""

    def total(points: Any, centroids: Any) -> Any:
        products = centroids @ points.T
        away = np.sum(centroids**2, axis=1)[:, None] + np.sum(points**2, axis=1) - 2 * products
        return np.sum(np.min(away, axis=0))

    return total


def direction() -> Callable[..., Any]:
    """The gradient by the centroids (k, d), divided by the Hessian, which is diagonal: its product with ones."""

    def step(points: Any, centroids: Any) -> Any:
        gradient = pe.grad(lambda c: cost()(points, c))
        slope, curvature = pe.jvp(gradient, (centroids,), (np.ones(centroids.shape),))
        return slope / curvature

    return step


FUNCTIONS = {"cost": cost, "dir": direction}
