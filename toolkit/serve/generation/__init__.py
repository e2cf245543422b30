"""A request of any API, run: its prompt, its choices in the engine, what its answers hold."""
