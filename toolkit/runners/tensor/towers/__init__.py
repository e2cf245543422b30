"""Vision towers as torch operations."""
