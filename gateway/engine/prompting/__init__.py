"""Prompts: from messages to tokens.

chat_template   rendering of messages with the model's chat template, in the sandbox
thoughts        how a chat template expects the thoughts in earlier turns
chat_tokenizer  a model's template, tokenizer and answer format
"""
