"""The names of other servers that the API accepts in addition to its own.

This is the only table of them: requests written for those servers work, or the error says what to
write instead.
"""

# Paths of llama-server, with ours: it accepts OpenAI's also without /v1.
_V1 = ("/chat/completions", "/chat/completions/input_tokens", "/models", "/responses")
PATHS = {path: f"/v1{path}" for path in (*_V1, "/responses/input_tokens", "/embeddings")}
PATHS |= {"/v1/health": "/health", "/completions": "/completion"}
PATHS |= dict.fromkeys(("/reranking", "/v1/rerank", "/v1/reranking"), "/rerank")

# Fields of requests, with their names at other servers.
FIELDS = {
    "n_predict": ("max_tokens", "max_completion_tokens"),
    "max_tokens": ("n_predict",),
    "n_probs": ("logprobs",),
    "n_cmpl": ("n",),
    "input": ("content",),  # llama-server's, of embeddings
    "reasoning_content": ("reasoning",),
    "thinking_budget_tokens": (
        *("reasoning_budget_tokens", "reasoning_budget", "thinking_token_budget"),
        "thinking_budget",
    ),
}

# Samplers that the API lacks, with the values that turn them off; answers name others as ignored.
SAMPLERS_OFF: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range"), (0,)),
    "typical_p": (1,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1, -0.01),
    "n_parallel": (1,),
}

# Fields of requests that constrain an answer, with their names in `structured_outputs`.
CONSTRAINTS = {
    "guided_json": "json",
    "json_schema": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}

# Unknown fields that change the answer are refused: ignoring them would give a wrong answer. So is
# every other `guided_` field, except those that concern only how a constraint is enforced.
CONSTRAINING = frozenset(
    {"use_beam_search", "logits_processors", "chat_template", "regex", "ebnf", "structural_tag"}
)
FORM_ONLY = frozenset({"guided_decoding_backend", "guided_whitespace_pattern"})
