"""Speculative decoding: guesses of a request's next tokens, which a step verifies. They change its speed alone."""
