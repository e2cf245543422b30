"""What of a checkpoint guesses tokens: draft heads, EAGLE layers, layers for multi-token prediction."""
