"""What one kind of engine serves under /v1. The rest of the server is the same for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from aiohttp import web

from kvshare.engines.base import Engine, GeneratingEngine
from proxy.context import GENERATING
from proxy.openai import routes as handlers


class Api(ABC):
    """An engine and the routes that need to know what kind it is."""

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    @abstractmethod
    def add_routes(self, app: web.Application) -> None:
        """All routes of clients."""

    @abstractmethod
    def add_operator_routes(self, app: web.Application) -> None:
        """`/admin/explain`, for a port that may or may not have the clients' routes as well."""

    @abstractmethod
    def add_model_list(self, app: web.Application) -> None:
        """`GET /v1/models` for the admin port: the bodies to explain name a model."""


class GeneratingApi(Api):
    """The engine computes the answers; bodies are read, answers are written here."""

    def __init__(self, engine: GeneratingEngine) -> None:
        self._engine = engine

    @property
    def engine(self) -> Engine:
        return self._engine

    def add_routes(self, app: web.Application) -> None:
        app[GENERATING] = self._engine
        self.add_model_list(app)
        app.router.add_get("/v1/models/{model:.+}", handlers.model)
        app.router.add_post("/v1/chat/completions", handlers.chat_completions)
        app.router.add_post("/v1/completions", handlers.completions)
        app.router.add_post("/v1/responses", handlers.responses)

    def add_operator_routes(self, app: web.Application) -> None:
        app[GENERATING] = self._engine
        app.router.add_post("/admin/explain", handlers.explain)

    def add_model_list(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", handlers.models)
