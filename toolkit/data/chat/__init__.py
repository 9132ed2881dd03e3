"""Chat templates and prompt styles: conversations to token ids with a loss mask."""
