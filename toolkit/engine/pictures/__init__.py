"""Pictures among a request's tokens."""
