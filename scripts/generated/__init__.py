"""What `make generate` writes from the code: tables of pages, the page of metrics, settings."""
