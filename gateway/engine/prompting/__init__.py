"""Prompts: from messages to tokens.

chat_template   rendering of messages with the model's chat template, in the sandbox
thoughts        the form in which a chat template reads the thoughts of earlier turns
chat_tokenizer  a model's template, tokenizer and answer format
"""
