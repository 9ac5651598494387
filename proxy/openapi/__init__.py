"""
What this server answers, as an OpenAPI document and as a page to read: `/openapi.json` and `/docs`.

`routes.yaml` has a row for each route, `schemas.yaml` the shapes of answers; `table.py` reads them,
`document.py` and `page.py` write, `routes.py` serves.
"""
