"""What layers keep of a sequence from one token slice to the next: keys and values, documents, dropout by place."""
