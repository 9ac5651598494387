"""The /v1 routes in front of vLLM: requests are planned and forwarded, answers are passed on."""

from proxy.relay.routes import add_routes

__all__ = ["add_routes"]
