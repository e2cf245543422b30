"""A model on several ranks: each computes a part of every layer, and they add up what they have."""
