"""A model's weights by name: of a checkpoint, made up, or rounded while they are read."""
