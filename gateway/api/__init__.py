"""HTTP and OpenAI semantics: one file per endpoint, no tensors."""
