"""Tests of the benchmarks: that their arithmetic is right and that they measure what they say."""
