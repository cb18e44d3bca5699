"""Sources of draft tokens: each file implements the `Drafter` protocol of `base`."""
