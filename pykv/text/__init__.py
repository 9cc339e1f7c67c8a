"""Between text and token ids: encoding, chat templates, streamed decoding and stop strings."""
