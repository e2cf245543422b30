"""Devices: memory, streams, events."""
