"""Speed of a model in the engine: ``throughput.measure`` under load, ``generation.measure`` at fixed batch sizes."""
