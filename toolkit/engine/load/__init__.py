"""From a model's name to an engine that is ready: runner, memory plan, checks."""
