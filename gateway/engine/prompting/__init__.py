"""Prompts: from messages to tokens.

chat_template   rendering of messages with the model's chat template
thoughts        the form in which a chat template expects thoughts
chat_tokenizer  a model's template, tokenizer and answer format
"""
