"""OpenAI's protocols: one module for each endpoint, and what completions and chats share."""
