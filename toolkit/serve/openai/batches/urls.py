"""Where the lines of a batch may go."""

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
URLS = (CHAT, TEXT, EMBEDDINGS, RESPONSES, RERANK, SCORE)
PROMPTED = (CHAT, TEXT, EMBEDDINGS, RESPONSES)  # those that take one prompt
