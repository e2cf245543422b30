"""Threads, places and memory of the server, shared out among requests."""
