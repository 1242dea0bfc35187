"""Tokens → an answer's text, reasoning and calls; without mlx. From the bottom up:

detokenizer    token ids → text; the vocabulary as bytes
stop_strings   the end before a stop string
output_parts   an answer's parts: text, reasoning, calls; the marks between them
call_reading   how calls are read by position: what all families share
tool_parsers   the text of a tool call → its function and arguments
harmony        gpt-oss's channels
tool_formats   a row for each family's way to write calls; picks one by the chat template
reasoning      a row for each way to mark thinking; whether a sequence is thinking
parsing        text → parts, as it comes
answer_format  what reads the answers of one model: its formats, with its tokens
"""
