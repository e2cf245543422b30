"""Tokens become text: detokenizing, stop words, one request's stream."""
