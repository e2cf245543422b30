"""KV blocks that leave the engine: kept in a folder, so that they are there after a restart and in other processes."""
