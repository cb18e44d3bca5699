"""Names that are accepted beside those in use: of earlier versions, and of other servers.

This is the only table of them. A new name for something that clients or operators already write
gets an entry here, so that what they wrote goes on working, or says what to write instead.
"""

from __future__ import annotations

# Paths of llama-server, with ours: it takes OpenAI's without their first part, too.
_V1 = ("/chat/completions", "/chat/completions/input_tokens", "/models", "/responses")
PATHS = {path: f"/v1{path}" for path in (*_V1, "/responses/input_tokens", "/embeddings")}
PATHS |= {"/v1/health": "/health", "/completions": "/completion"}
PATHS |= dict.fromkeys(("/reranking", "/v1/rerank", "/v1/reranking"), "/rerank")

DRAFTERS = {"ngram": "suffix", "ngram_cache": "suffix"}

# Fields of requests that constrain an answer, with the field of `structured_outputs` that each is.
CONSTRAINTS = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}

# Unknown fields that ask for another answer are refused: without them it would be a wrong one. So
# is every other `guided_` field, but not those that concern only how a constraint is kept.
CONSTRAINING = frozenset(
    {"use_beam_search", "logits_processors", "chat_template", "regex", "ebnf", "structural_tag"}
)
FORM_ONLY = frozenset({"guided_decoding_backend", "guided_whitespace_pattern"})

# Fields of requests that change nothing, with the reason.
WITHOUT_EFFECT = {
    "exact": "accepted and without effect: output is always bit for bit that of plain decoding, "
    "alone or beside others, where GET /v1/models says `batch_invariant`",
    "share_ngrams": "accepted and without effect: SPECOPS_PREFIX_CACHE decides which requests use "
    "the texts of earlier requests; by default those of the same client",
}

IGNORED_SETTINGS = frozenset({"SPECOPS_EXACT"})
_FIXED = "is gone: `adaptive: false` and `k_draft` of a request fix its number of draft tokens"
FORMER_SETTINGS = {  # refused, with what to do instead
    "SPECOPS_LONGEST_PAUSE": "is called SPECOPS_MAX_INTER_TOKEN_LATENCY now",
    "SPECOPS_ROWS": "is called SPECOPS_SLOTS now",
    "SPECOPS_PREFILL_CHUNK": "is called SPECOPS_MAX_BATCHED_TOKENS now",
    "SPECOPS_ADAPTIVE": _FIXED,
    "SPECOPS_K_DRAFT": _FIXED,
    "SPECOPS_LOG_PROMPTS": "is gone: SPECOPS_LOG_LEVEL=info+prompts logs prompts and answers",
    "SPECOPS_MEMORY_FIT": "is gone: without SPECOPS_KV_TOKENS and SPECOPS_CONTEXT the KV cache "
    "takes what fits",
    "SPECOPS_QUEUE_ORDER": "is gone: short prompts go first, and keys get equal shares",
    "SPECOPS_QUEUE_TIMEOUT": "is gone: SPECOPS_REQUEST_TIMEOUT includes the wait for a slot",
    "SPECOPS_SHARED_NGRAMS": "is gone: SPECOPS_PREFIX_CACHE says which requests share",
}
