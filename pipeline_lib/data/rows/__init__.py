"""Files of any common layout, read row by row: each is a conversation or text, or is rejected with a reason."""
