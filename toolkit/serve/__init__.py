"""The OpenAI-compatible server: ``run.serve`` starts it, ``app.create_app`` builds the ASGI application alone."""
