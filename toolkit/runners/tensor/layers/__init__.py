"""What the layers of a decoder are made of."""
