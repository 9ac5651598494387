"""Describes this server's routes as an OpenAPI document, `/openapi.json`, and as a page, `/docs`."""
