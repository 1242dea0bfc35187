"""Anthropic's SDKs and its terminal agent, unchanged, against /v1/messages."""
