"""What a format of the KV cache costs in quality: perplexity and greedy agreement over a fixed text."""
