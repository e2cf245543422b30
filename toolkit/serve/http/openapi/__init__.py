"""``/openapi.json`` and the page that shows it."""
