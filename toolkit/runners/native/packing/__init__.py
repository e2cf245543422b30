"""Weights in the native library's tiles, and back."""
