"""What the manifests say, held against the API servers' schemas and against the service itself."""
