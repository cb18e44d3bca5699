"""Sources of guesses. A new one is one file here that keeps the `Drafter` protocol of `base`."""
