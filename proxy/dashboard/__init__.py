"""The page at /admin/ui: static files, which hold no data, and the route that sends them."""
