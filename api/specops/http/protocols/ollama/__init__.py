"""Ollama's protocol: answers, embeddings, and models."""
