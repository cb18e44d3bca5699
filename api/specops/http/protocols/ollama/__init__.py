"""Ollama's protocol: answers, embeddings, and what it tells of models."""
