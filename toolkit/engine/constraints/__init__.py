"""What a request asks of its tokens beyond sampling: grammars, bad words, repeated n-grams."""
