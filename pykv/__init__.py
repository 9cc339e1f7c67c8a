"""pykv."""
