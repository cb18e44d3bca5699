"""OpenAI's protocols: one module for each endpoint, and one shared by completions and chats."""
