"""Where the lines of a batch may go."""

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
CLASSIFY = "/classify"
POOLING = "/pooling"
URLS = (CHAT, TEXT, EMBEDDINGS, RESPONSES, RERANK, SCORE, CLASSIFY, POOLING)
PROMPTED = (CHAT, TEXT, EMBEDDINGS, RESPONSES, CLASSIFY, POOLING)  # those that take one prompt
