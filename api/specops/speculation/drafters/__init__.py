"""Sources of draft tokens: each is one file that keeps the `Drafter` protocol of `base`."""
