"""What ``train_tiny_vlm`` is made of."""
