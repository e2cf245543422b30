"""Vision towers on the native library."""
