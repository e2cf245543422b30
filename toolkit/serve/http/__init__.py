"""What the routes of every API share: connections, keys, limits, bodies, errors, answers."""
