"""Messages → the tokens of a prompt.

chat_template   messages → text, in the sandbox
thoughts        the form in which a template reads thoughts
chat_tokenizer  a model's template and vocabulary, and the format of its answers
"""
