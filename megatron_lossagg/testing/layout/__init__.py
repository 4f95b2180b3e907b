"""How a batch is spread over ranks."""
