"""Anthropic's SDKs, unchanged, against /v1/messages."""
