"""What infra/ says, held against the API servers' schemas and against the service itself."""
