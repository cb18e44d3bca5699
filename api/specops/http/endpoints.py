"""Names the endpoint of a path, so that metrics have a label for each route and none for a path."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route

from specops.metrics.series import OTHER


class Endpoints:
    """The paths of the application's routes.

    Args:
        routes: those of the application and of its routers.

    Attributes:
        paths: of the endpoints, with their parameters: `/v1/models/{model}`.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        by_path = {route.path_format: route for route in routes if isinstance(route, Route)}
        self.paths = tuple(by_path)
        self._fixed = {path for path, route in by_path.items() if not route.param_convertors}
        self._patterns = [
            (route.path_regex, path) for path, route in by_path.items() if route.param_convertors
        ]

    def of(self, path: str) -> str:
        """Return the endpoint of a request's path, or `OTHER`."""
        if path in self._fixed:
            return path
        return next((name for regex, name in self._patterns if regex.match(path)), OTHER)
