"""What is kept between steps: KV blocks, the prefixes that they hold, and who uses them."""
