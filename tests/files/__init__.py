"""Published files against the libraries they were made for: `make files`."""
