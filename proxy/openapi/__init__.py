"""What this server answers, as an OpenAPI document and as a page to read: `/openapi.json` and `/docs`."""
